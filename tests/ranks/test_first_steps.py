"""What a run notices of a user's code before its first step: each planted culprit, and nothing of a sound model."""

import importlib.util
import re
import shutil

import pytest
import torch
from culprit_names import CULPRITS
from places import OWN
from torch import nn
from training_runs import config_in, run_on_rank

from lockstep.core.modules.call_checksums import CallChecksums
from lockstep.core.modules.hidden_state import Snapshot, changed
from lockstep.core.numerics.checksum import checksum
from lockstep.run.user_code_checks import UserCodeChecks

SHORT = {"train": {"epochs": None, "steps": 2}, "evaluate": {"every_epochs": None}}
QUICK = ("Unseeded", "Counting", "Ranked")
SPREADS = [("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2)]


def own_model(tmp_path, file, name="a", **sections):
    """The config of a short run of a model of tests/own, in a copy of its file: what a file keeps would else pass from
    one test to the next, as processes serve several."""
    options, parallel = sections.pop("options"), sections.pop("parallel", {"kind": "ddp"})
    copy = shutil.copy(OWN / file, tmp_path)
    model = {"kind": "user", "file": str(copy), "options": options}
    merged = {key: {**SHORT.get(key, {}), **sections.get(key, {})} for key in {*SHORT, *sections}}
    return config_in(tmp_path, name, model=model, parallel=parallel, **merged)


@pytest.mark.parametrize(
    ("odd", "kind", "world"),
    [
        pytest.param(odd, *spread, marks=[] if odd in QUICK and spread != ("ddp", 3) else [pytest.mark.matrix])
        for odd in CULPRITS
        for spread in SPREADS
        if odd != "Ranked" or spread != ("single", 1)  # there is nobody to be compared with
    ],
)
def test_a_planted_culprit_is_noticed(ranks, tmp_path, odd, kind, world):
    """Its kind, module and line; the summary says that the promise is off."""
    config = own_model(tmp_path, "culprits.py", options={"odd": odd}, parallel={"kind": kind})
    summary = ranks(world, run_on_rank, config)[0]
    assert summary["status"] == "finished"
    (found,) = summary["findings"]
    expected, where = CULPRITS[odd]
    assert found["kind"] == expected and found["where"].startswith(where), found
    assert summary["digest_depends_on_world"] == found["what"]
    file, line = found["where"].rstrip(")").rsplit(", ", 1)[1].rsplit(":", 1)
    assert file == str(tmp_path / "culprits.py")
    text = (OWN / "culprits.py").read_text().splitlines()[int(line) - 1]
    assert where.split("(")[1].split(",")[0].split(".")[0] in text or where.split(" ")[0].split(".")[-1] in text


@pytest.mark.parametrize(("kind", "world"), SPREADS)
def test_a_weight_that_a_forward_pass_changes_is_refused(ranks, tmp_path, kind, world):
    config = own_model(tmp_path, "culprits.py", options={"odd": "Renormed"}, parallel={"kind": kind})
    message = ranks(world, run_on_rank, config)[0]
    assert message.startswith("ModelError: the forward pass changes the parameter network.body.3.weight in place")


@pytest.mark.parametrize("odd", ["Counting", "Ranked", pytest.param("Unseeded", marks=pytest.mark.matrix)])
def test_a_pipeline_notices_or_refuses(ranks, tmp_path, odd):
    """It compares its stages with the whole model first; a rank is not seen where no two run the same stage."""
    config = own_model(tmp_path, "culprits.py", options={"odd": odd}, parallel={"kind": "pipeline", "stages": 2})
    summary = ranks(4 if odd == "Ranked" else 2, run_on_rank, config)[0]
    if odd == "Unseeded":
        assert "module network.body.3 (Unseeded, " in summary and "called again with equal inputs" in summary
    else:
        assert [found["where"].startswith(CULPRITS[odd][1]) for found in summary["findings"]] == [True]


@pytest.mark.parametrize("net", ["images", "recurrent", "tied", "gpt"])
def test_a_sound_model_is_not_suspected(ranks, tmp_path, net):
    """BatchNorm, dropout, RNNs, spectral norm, tied weights, attention that is kept for a look, tables made once."""
    config = own_model(
        tmp_path, "clean.py", options={"net": net}, parallel={"kind": "ddp", "find_unused": net == "gpt"}
    )
    summary = ranks(2, run_on_rank, config)[0]
    assert summary["findings"] == []
    assert summary["digest_depends_on_world"] is None


@pytest.mark.parametrize(
    "parallel",
    [
        {"kind": "fsdp"},
        pytest.param({"kind": "pipeline", "stages": 2}, marks=pytest.mark.matrix),
        pytest.param({"kind": "pipeline", "stages": 2, "schedule": "interleaved"}, marks=pytest.mark.matrix),
    ],
    ids=["fsdp", "pipeline", "interleaved"],
)
def test_nothing_is_suspected_where_a_model_is_spread(ranks, tmp_path, parallel):
    """And the digest is that of one process, with the counters of BatchNorm."""
    config = own_model(tmp_path, "culprits.py", options={"odd": "Sound"}, parallel=parallel)
    alone = own_model(tmp_path, "culprits.py", "alone", options={"odd": "Sound"}, parallel={"kind": "single"})
    spread = ranks(2, run_on_rank, config)[0]
    assert spread["findings"] == []
    assert spread["digest"] == ranks(1, run_on_rank, alone)[0]["digest"]


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("mean of one", "the loss looks like a mean: it gave LossSum("),
        ("mean", "the loss looks like a mean: it gave LossSum("),
        ("contrastive", "the loss is no sum over its samples: it gave LossSum("),
        ("ignoring", None),
        ("unseeded", "the loss gave other outputs for equal inputs"),
    ],
)
def test_a_loss_that_is_no_sum_is_noticed(ranks, tmp_path, loss, says):
    """It does not depend on the number of processes; an unseeded one does."""
    summary = ranks(1, run_on_rank, own_model(tmp_path, "culprits.py", options={"loss": loss}))[0]
    found = summary["findings"]
    if says is None:
        assert found == []
        return
    (one,) = found
    assert one["what"].startswith(says)
    assert (one["kind"] == "loss") == (summary["digest_depends_on_world"] is None)


def test_a_declared_loss_is_not_suspected(ranks, tmp_path):
    """Nor does the declaration change a bit."""
    train = {**SHORT["train"], "loss_is": "batch_wise"}
    plain = ranks(1, run_on_rank, own_model(tmp_path, "culprits.py", "plain", options={"loss": "contrastive"}))[0]
    declared = [
        ranks(w, run_on_rank, own_model(tmp_path, "culprits.py", f"w{w}", options={"loss": "contrastive"}, train=train))
        for w in (1, 2)
    ]
    for summary, *_ in declared:
        assert summary["findings"] == []
        assert summary["digest"] == plain["digest"]


def test_data_that_is_not_the_same_again_is_noticed(ranks, tmp_path):
    (tmp_path / "bad.py").write_text(
        "import numpy as np\n\n\ndef augment(sample):\n"
        "    noise = np.random.default_rng().integers(0, 5, sample['image'].shape, dtype=np.uint8)\n"
        "    return {**sample, 'image': sample['image'] // 2 + noise}\n"
    )
    config = own_model(tmp_path, "culprits.py", options={}, data={"augment": str(tmp_path / "bad.py")})
    (found,) = ranks(1, run_on_rank, config)[0]["findings"]
    assert found["kind"] == "data" and "the data (image) is not the same" in found["what"]


def without_a_look(config):
    """A run in which nobody looks at the user's code."""
    UserCodeChecks.steps, before = (lambda checks, start: checks.parts.steps(start)), UserCodeChecks.steps
    try:
        return run_on_rank(config)
    finally:
        UserCodeChecks.steps = before


@pytest.mark.parametrize(
    ("file", "options"),
    [("clean.py", {"net": net}) for net in ("images", "recurrent")]
    + [
        pytest.param("culprits.py", {"odd": odd}, marks=[] if odd in ("Mean", "FileDice") else [pytest.mark.matrix])
        for odd in (
            "Mean",
            "FileDice",
            "Dice",
            "PythonDice",
            "Counting",
            "Queue",
            "Remembering",
            "FileCounting",
        )
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else None,
)
def test_looking_changes_no_bit(ranks, tmp_path, file, options):
    """Not even where the model keeps something that the look has changed and put back."""
    found = []
    for name, call in (("looked", run_on_rank), ("not", without_a_look)):
        ranks.close()  # a user's globals live as long as the process
        found.append(ranks(1, call, own_model(tmp_path, file, name, options=options))[0])
    assert found[0]["findings"] is not None and found[1]["findings"] is None
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["chain"] == found[1]["chain"]


def culprits():
    spec = importlib.util.spec_from_file_location("culprits_here", OWN / "culprits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("odd", ["Dice", "PythonDice", "FileDice", "Counting", "FileCounting", "Queue", "Mean"])
def test_what_is_kept_is_put_back(odd):
    module = culprits()
    layer = getattr(module, odd)()
    torch.manual_seed(0)
    x = torch.randn(4, module.WIDTH)
    with torch.no_grad():
        layer(x)
        before = Snapshot(layer, is_kept=True)
        first = layer(x)
        assert len(changed(before, Snapshot(layer))) == 1
        before.restore()
        assert not changed(before, Snapshot(layer))
        assert torch.equal(layer(x), first)


class Holder(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held


@pytest.mark.parametrize(
    "held",
    [None, 1.5, float("nan"), "a", [1, [2, {"a": {3}}]], (torch.zeros(2), torch.ones(1, requires_grad=True) * 2)]
    + [nn.Linear(2, 2), [nn.Linear(2, 2)], {1: torch.Generator()}, torch.zeros(2).to_sparse(), torch.float32]
    + [
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(2, device="meta"),
        lambda: 3,
        object(),
        range(3),
        list[int],
    ],
    ids=lambda held: re.sub(r" at 0x\w+", "", repr(held)),  # the same in every process
)
def test_anything_may_be_held(held):
    """And what nobody changed is not said to have changed."""
    model = Holder(held)
    before = Snapshot(model, is_kept=True)
    assert not changed(before, Snapshot(model))
    before.restore()
    assert model.held is held


def test_calls_are_in_the_order_in_which_they_end_and_see_what_was_written_to():
    inner = nn.Linear(2, 2)
    model = nn.Sequential(inner, nn.ReLU())
    inner.register_forward_hook(lambda module, *_: module.weight.data.mul_(1))
    with torch.no_grad(), CallChecksums(model) as calls:
        model(torch.ones(1, 2))
        model.eval()
        model(torch.ones(1, 2))
    assert [name for name, *_ in calls.read()] == ["0", "1", ""]
    assert calls.changed == {"0.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64])
def test_a_checksum_sees_bits_order_and_shape(dtype):
    one = torch.arange(6).to(dtype).view(2, 3)
    assert checksum(one) == checksum(one.t().contiguous().t())
    others = [one.flip(0), one.view(3, 2), one.clone().index_fill_(0, torch.tensor([1]), 0), one[:1]]
    assert all(checksum(other) != checksum(one) for other in others)
    assert checksum(torch.zeros(2)) != checksum(-torch.zeros(2))
    assert checksum(one[:0]) != checksum(one[:0].t())


def test_memory_can_be_freed_after_a_checksum():
    """As FSDP does, whose weights may be what a module is called with."""
    weight = torch.zeros(3)
    checksum(weight)
    weight.untyped_storage().resize_(0)
