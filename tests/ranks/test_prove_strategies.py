"""`lockstep prove` on strategies and on what is measured: each planted culprit is named, and what is equal is called so.

The runs are those of a proof, in warm processes instead of new ones.
"""

import io

import pytest
from culprit_names import CULPRITS
from places import OWN
from proofs import proof_of
from rich.console import Console

from lockstep.base import plugins
from lockstep.tools.prove.proof_table import print_proof

QUICK = [("Unseeded", "ddp"), ("Unseeded", "fsdp"), ("Dice", "ddp"), ("Dice", "fsdp"), ("Ranked", "fsdp")]
KINDS = ("single", "ddp", "fsdp", "pipeline")

METRIC = """
import time

import torch
from torchmetrics import Metric

from culprits import build


class Own(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", default=torch.zeros(()), dist_reduce_fx="sum")

    def update(self, number):
        self.total = self.total + number

    def compute(self):
        return self.total


def clock(outputs, batch):
    return (time.time() % 100,)


def rank(outputs, batch):
    return (torch.distributed.get_rank(),)


def metrics(spec):
    return {"own": (Own(), KIND)}
"""


def own(file="culprits.py", **options):
    return {"kind": "user", "file": str(OWN / file), "options": options}


@pytest.fixture(scope="module")
def proofs(ranks, tmp_path_factory):
    """Culprit -> a proof, whose first run is shared."""
    made = {}

    def proof(odd):
        if odd not in made:
            folder = tmp_path_factory.mktemp(odd)
            made[odd] = proof_of(ranks, folder, model=own(odd=odd), parallel={"kind": "ddp"})
        return made[odd]

    return proof


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        pytest.param(odd, kind, marks=[] if (odd, kind) in QUICK else [pytest.mark.matrix])
        for odd in CULPRITS
        for kind in KINDS
        if odd != "Ranked" or kind in ("ddp", "fsdp")  # no two processes run the same block
    ],
)
def test_a_culprit_is_named_under_each_strategy(proofs, odd, kind):
    """Where the steps are equal by luck, or the strategy refuses the model, too."""
    row = proofs(odd).strategy(kind)
    assert row.result == "DIFFERS" or (row.result == "not shown" and kind != "ddp"), row
    where = CULPRITS[odd][1]
    if "pipeline refuses" in row.cause:  # which names the module
        where = {"state": f"network.body.3 ({odd}, "}.get(CULPRITS[odd][0], where)
    assert where in row.cause, row
    assert f"{OWN / 'culprits.py'}:" in row.cause


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("clock", "gives something else in one process again, too: it asks for the time"),
        ("rank", "depends on the process (its rank,"),
    ],
)
def test_a_metric_is_the_culprit(ranks, tmp_path, kind, why):
    """The weights are equal, and are said to be."""
    (tmp_path / "culprits.py").write_text((OWN / "culprits.py").read_text())
    text = METRIC.replace("KIND", kind)
    (tmp_path / "own.py").write_text(text)
    model = {"kind": "user", "file": str(tmp_path / "own.py"), "options": {}}
    proof = proof_of(ranks, tmp_path, model=model, train={"stop_metric": "own"})
    assert proof.strategy("ddp").result == "shown"
    last = proof.measured()
    line = text.splitlines().index("class Own(Metric):") + 1
    assert last.result == "DIFFERS"
    assert f"the metric `own` (Own, {tmp_path}/own.py:{line}) differs: after step 4 it is" in last.cause
    assert why in last.cause and "the weights are equal" in last.cause
    assert "train.stop_metric=own ends a run by it" in last.cause


def test_a_sound_model_is_proven_with_every_strategy(ranks, tmp_path):
    """And on every world; it makes no difference which strategy the config names."""
    digests = set()
    for kind in ("single", "fsdp"):
        (tmp_path / kind).mkdir()
        proof = proof_of(ranks, tmp_path / kind, model=own(odd="Sound"), parallel={"kind": kind})
        rows = proof.rows(("repeat", "worlds", "strategies", "evaluate") if kind == "single" else ("strategies",))
        assert [row.result for row in rows] == ["shown"] * (9 if kind == "single" else 5), rows
        digests |= {row.digest for row in rows if "weights and steps" in row.what}
    assert len(digests) == 1


@pytest.mark.parametrize(
    "parallel",
    [{"kind": "pipeline", "stages": 2, "schedule": "gpipe"}, {"kind": "fsdp", "replicas": 2}]
    + [{"kind": "pipeline", "cut": [1, 2]}],
    ids=["stages", "replicas", "cut"],
)
def test_groups_are_left_out_where_processes_cannot_form_them(parallel):
    section = plugins.find("parallel.strategies", parallel["kind"]).Config(**parallel)
    least = 3 if "cut" in parallel else 2
    assert section.fitted(least) == section == section.fitted(2 * least)
    assert section.fitted(1) == section.model_copy(
        update={"replicas": 1} if "replicas" in parallel else {"stages": "auto", "cut": "auto"}
    )


def test_a_strategy_that_refuses_is_listed(ranks, tmp_path):
    """With its reason, as something that could not be shown. The first run trains a weight that is a single number."""
    (tmp_path / "culprits.py").write_text((OWN / "culprits.py").read_text())
    (tmp_path / "own.py").write_text(
        "import torch\n\nfrom culprits import build as built\n\n\n"
        "def build(options, spec):\n    model = built(options, spec)\n"
        "    model.scale = torch.nn.Parameter(torch.ones(()))\n"
        "    model.head.register_forward_hook(lambda _, __, outputs: outputs * model.scale)\n"
        "    return model\n"
    )
    proof = proof_of(ranks, tmp_path, model={"kind": "user", "file": str(tmp_path / "own.py"), "options": {}})
    row = proof.strategy("fsdp")
    assert row.result == "not shown"
    assert row.cause.startswith(
        "fsdp refuses this run: network.scale is a number without axes, which cannot be sharded"
    )


def test_a_loss_that_differs_by_itself_is_told_apart_from_the_weights(ranks, tmp_path):
    """A number that depends on the rank is added to it: every gradient is the same."""
    (tmp_path / "culprits.py").write_text((OWN / "culprits.py").read_text())
    (tmp_path / "own.py").write_text(
        "import torch\n\nfrom culprits import build\nfrom lockstep import LossSum\n\n\n"
        "def loss(outputs, batch):\n"
        "    total = torch.nn.functional.cross_entropy(outputs, batch['label'], reduction='sum')\n"
        "    return LossSum(total + 0.25 * torch.distributed.get_rank() * torch.is_grad_enabled(), len(outputs))\n"
    )
    proof = proof_of(ranks, tmp_path, model={"kind": "user", "file": str(tmp_path / "own.py"), "options": {}})
    row = proof.strategy("ddp")
    assert row.result == "DIFFERS" and "from step 1 on" in row.digest
    assert row.cause.startswith("the weights are equal, but the loss of step 1 is ")


@pytest.mark.parametrize("loss_is", ["batch_wise", "sample_wise"])
def test_a_declared_loss_is_no_failure(ranks, tmp_path, loss_is):
    """Undeclared, it is one that is no sum."""
    train = {"loss_is": loss_is}
    proof = proof_of(ranks, tmp_path, model=own(loss="contrastive"), train=train, parallel={"kind": "ddp"})
    same, split = proof.rows(("repeat",))
    assert same.result == "shown"
    if loss_is == "sample_wise":
        assert split.result == "DIFFERS" and "the loss is no sum over its samples" in split.cause
        return
    assert split.result == "declared"
    assert "equal on any number of processes at this micro-batch (train.micro_batch=8)" in split.cause
    assert proof.strategy("fsdp").result == "shown"
    output = io.StringIO()
    assert print_proof([same, split], Console(file=output)) == 0
    assert "1 of 2 shown, none differs; 1 declared." in output.getvalue()
