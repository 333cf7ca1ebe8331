"""observe.recheck: bits that flip on one rank are found before the update, and the weights are those without them."""

import pathlib

import pytest
import torch
import torch.distributed as dist
from members import further
from places import OWN
from training_runs import config_in, run_on_rank

from lockstep.base.errors import ConfigError
from lockstep.recipe import recipe as recipes
from lockstep.run.rechecking import shifts

MODEL = {"kind": "user", "file": str(OWN / "normed.py")}
"""With BatchNorm and dropout."""
STEPS = 7


ODD = """
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import LossSum


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.unused = nn.Embedding(1 << 16, 16), nn.Linear(16, 16)
        self.digit, self.dropout = nn.Linear(16, 10), nn.Dropout(0.2)
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def forward(self, batch):
        if self.training:
            self.pointer.copy_((self.pointer + len(batch["image"])) % 97)
        found = self.embedding(batch["image"].flatten(1).long() * 200).mean(1)
        return self.digit(self.dropout(found + 0.01 * self.pointer))


def buffers(module):
    return {"pointer": "in_order"}


def loss(outputs, batch):
    total = F.cross_entropy(outputs, batch["label"], reduction="sum")
    even = batch["label"] % 2 == 0
    off = (outputs.square().mean(1) * even).sum()
    return LossSum(total, len(outputs), terms={"even": LossSum(off, even.sum())})


def term_counts(batch):
    return {"even": (batch["label"] % 2 == 0).sum()}


def build(options, spec):
    return Network()
"""


def flip(tensor):
    """Change the highest bits of the fractions of some numbers: a ReLU or dropout may hide that of one."""
    tensor.detach().as_strided([32], [1]).view(torch.int32).bitwise_xor_(3 << 21)


class Flipping:
    """Bits of one rank flip: in the outputs of a module, from a call in training on, or in the gradients' sum."""

    def __init__(self, rank, where, first, last=None):
        self.rank, self.where, self.first, self.last = rank, where, first, last or first
        self.calls = 0

    def starting(self, task, training):
        parts = task.parts
        if dist.get_rank() != self.rank:
            return
        if self.where == "sum":
            self.real, self.parameters = parts.strategy.forward_backward, parts.strategy.parameters
            parts.strategy.forward_backward = self.summed
        else:
            self.module = parts.model.get_submodule(self.where)
            self.real, self.module.forward = self.module.forward, self.called

    def is_due(self, counts):
        self.calls += counts
        return self.first <= self.calls <= self.last

    def called(self, inputs):
        outputs = self.real(inputs)
        if self.module.training and self.is_due(torch.is_grad_enabled()):
            outputs = outputs.clone()
            flip(outputs)
        return outputs

    def summed(self, micro_batches):
        loss = self.real(micro_batches)
        if self.is_due(True):
            flip(self.parameters[0].grad)
        return loss


def run(ranks, tmp_path, world, share, hooks=None, answer="warn", model=MODEL, **sections):
    name = f"run-{len(list(tmp_path.iterdir()))}"
    observe = {"sinks": ["jsonl"], "log_every": 1, "recheck": share, "on_corruption": answer}
    config = config_in(
        tmp_path, name, model=model, observe=observe, **{"train": {"steps": STEPS, "epochs": None}} | sections
    )
    found, *_ = ranks(world, run_on_rank, config, "auto", None, False, hooks)
    return found


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory):
    return run(ranks, tmp_path_factory.mktemp("undisturbed"), 1, None)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_weights_are_those_without_rechecks(ranks, tmp_path, undisturbed, world):
    """Also where steps have few shards, so that some ranks run none."""
    found = run(ranks, tmp_path, world, 1.0)
    assert found["digest"] == undisturbed["digest"] and found["chain"] == undisturbed["chain"]
    assert found["rechecked"] == {"steps": STEPS, "right_at": STEPS} and undisturbed["rechecked"] == {}


ALWAYS = 10**9
OF_SHARD, OF_SUM = "computes wrongly: its gradients of shard", "computes wrongly: its sums over all shards differ"


@pytest.mark.parametrize(
    ("world", "fault", "said"),
    [
        (3, (1, "network.head.fc1", 5), OF_SHARD),
        (3, (0, "network.head.fc1", 5, ALWAYS), "the first module with other outputs is network.head.fc1 (torch.nn"),
        (3, (1, "sum", 4), OF_SUM),
        (2, (1, "sum", 4), OF_SUM),
        (1, (0, "network.head.fc1", 9), OF_SHARD),
        *further(
            (3, (2, "network.features.conv1", 4, ALWAYS), "with other outputs is network.features.conv1"),
            (2, (1, "network.head.fc1", 5), OF_SHARD),
            (1, (0, "sum", 4), OF_SUM),
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_rank_that_computes_wrongly_is_named_and_changes_nothing(ranks, tmp_path, undisturbed, world, fault, said):
    found = run(ranks, tmp_path, world, 1.0, Flipping(*fault))
    assert found["digest"] == undisturbed["digest"] and found["chain"] == undisturbed["chain"]
    told = found["rechecked"]["found"]
    assert all(f"rank {fault[0]} on " in each for each in told), told
    assert said in told[0] and (ALWAYS not in fault) == (len(told) == 1)


@pytest.mark.parametrize(
    ("world", "where", "first", "said"),
    [
        (2, "network.head.fc1", 9, "step 3 was run 6 times, and no majority agrees on its gradients\n"),
        (3, "sum", 4, OF_SUM),
    ],
)
def test_ranks_that_never_agree_end_the_run(ranks, tmp_path, world, where, first, said):
    found = run(ranks, tmp_path, world, 1.0, Flipping(1, where, first, ALWAYS))
    assert found.startswith("Corruption: step ") and said in found, found
    assert world == 2 or "rank 1 on " in found


def test_the_run_ends_and_later_checkpoints_are_set_aside(ranks, tmp_path):
    """Those of steps that were not rechecked; which are, follows from the seed."""
    found = run(
        ranks, tmp_path, 3, 0.3, Flipping(1, "network.head.fc1", 3, ALWAYS), "leave", checkpoint={"every_steps": 1}
    )
    assert (
        found.startswith("Corruption: step ")
        and "rank 1 on" in found
        and "the first module with other outputs" in found
    )
    (folder,) = (path for path in tmp_path.iterdir())
    left = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert left == [], found


def test_what_is_not_plain_is_rechecked_too(ranks, tmp_path):
    """Rows of a large embedding, a loss of several terms, buffers that go from one shard to the next."""
    (file := tmp_path / "odd.py").write_text(ODD)
    settings = {
        "model": {"kind": "user", "file": str(file)},
        "train": {"steps": STEPS, "epochs": None, "precision": "bf16", "recompute": True, "ema": 0.9},
        "parallel": {"kind": "ddp", "find_unused": True},
    }
    plain = run(ranks, tmp_path, 1, None, **settings)
    found = run(ranks, tmp_path, 3, 1.0, answer="stop", **settings)
    assert isinstance(found, dict), found
    assert found["digest"] == plain["digest"] and found["rechecked"] == {"steps": STEPS, "right_at": STEPS}


def test_a_share_of_the_steps_is_rechecked(ranks, tmp_path, undisturbed):
    found = run(ranks, tmp_path, 2, 0.5)
    assert found["digest"] == undisturbed["digest"] and 0 < found["rechecked"]["steps"] < STEPS


def test_code_whose_gradients_depend_on_more_is_not_rechecked(ranks, tmp_path):
    """It would convict a process that computes rightly."""
    model = {"kind": "user", "file": str(OWN / "culprits.py"), "options": {"odd": "Dice"}}
    found = run(ranks, tmp_path, 2, 1.0, answer="stop", model=model)
    assert set(found["rechecked"]) == {"off", "right_at"} and found["rechecked"]["right_at"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel.kind=fsdp"], "processes share a model with parallel.kind=fsdp, and none could run a shard alone"),
        (["parallel.kind=pipeline"], "with parallel.kind=pipeline"),
        (["run.reproducibility=fast"], "run.reproducibility=fast gives other bits"),
        (["train.batchnorm=sync"], "train.batchnorm=sync makes a shard depend on"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_rechecked_is_refused(tmp_path, words, said):
    (file := pathlib.Path(tmp_path, "c.yaml")).write_text("observe: {recheck: 0.02}\n")
    with pytest.raises(ConfigError, match=said):
        recipes.load(file, words)


def test_shards_move_to_other_machines():
    assert shifts([0]) == [0]
    assert shifts([0, 0, 0]) == [0, 1, 2]
    assert shifts([0, 0, 2, 2])[:2] == [0, 2]
    assert shifts([0, 0, 0, 3])[1] in (1, 2, 3)
    assert shifts([0, 1, 2, 3]) == [0, 1, 2, 3]
