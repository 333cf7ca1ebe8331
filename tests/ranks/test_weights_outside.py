"""Weights that change outside of the optimizer: by a declared rule, with the value of one process; else refused by name."""

import json

import pytest
import torch
from members import further
from places import OWN
from running import lockstep
from strategy_runs import Network, images, prepared
from torch import nn
from training_runs import config_in, run_on_rank

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Averaged
from lockstep.models._user import averaged
from lockstep.training.step import step

FILE = OWN / "copies.py"
LATE = FILE.with_name("late.py")
SPREADS = [("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3)]
EACH = [("single", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 3), ("pipeline", 2)]
FEW = [("ddp", 2), ("fsdp", 3)]
MORE = [("ddp", 3), ("fsdp", 2), ("pipeline", 3)]


def config(folder, odd, kind, world, *, steps=5, file=FILE, **model):
    model = {"kind": "user", "file": str(file), "options": {"odd": odd}, **model}
    sections = {"train": {"epochs": None, "steps": steps}, "evaluate": {"every_epochs": None}}
    return config_in(folder, f"{odd}-{kind}-{world}", model=model, parallel={"kind": kind}, **sections)


@pytest.mark.parametrize("odd", ["momentum", "data", "copied", "by-hand", "late", "early", "clamped"])
def test_what_changes_by_itself_is_refused_by_name(ranks, tmp_path, odd):
    """In the first steps, or in the one that changes it."""
    for kind, world in [("single", 1), ("ddp", 2), ("fsdp", 2)]:
        message = ranks(world, run_on_rank, config(tmp_path, odd, kind, world))[0]
        name = {"late": "online.", "early": "online.", "clamped": "online.", "by-hand": "head.bias"}.get(odd, "target.")
        assert isinstance(message, str), (kind, message)
        assert f"the parameter network.{name}" in message, (kind, message)
        assert ("model.unfreeze" if odd in ("late", "early") else "averages(module)") in message


@pytest.mark.parametrize(
    ("odd", "name", "spreads"),
    [
        ("weight", "the parameter", EACH),
        ("level", "the buffer", FEW),
        *further(
            ("weight", "the parameter", MORE), ("level", "the buffer", [*EACH, *MORE]), ("bias", "the parameter", EACH)
        ),
    ],
)
def test_what_begins_to_change_late_and_past_autograd_is_refused(ranks, tmp_path, odd, name, spreads):
    """At the next comparison by value; where it gets another storage, in the step that does it."""
    for kind, world in spreads:
        made = config(tmp_path, odd, kind, world, steps=60, file=LATE)
        if kind == "pipeline":  # one stage alone runs the layer
            (tmp_path / "run.yaml").write_text(json.dumps(made))
            message = lockstep(tmp_path, "train", "run.yaml", f"launch.processes={world}").stderr
        else:
            message = ranks(world, run_on_rank, made)[0]
        assert f"{name} network.head.{odd}" in message, (kind, world, message)


def test_weights_that_no_loss_reaches_are_named(ranks, tmp_path):
    """Also where nothing refuses them; not those that are frozen, or trained from a later step on."""
    for kind, world in EACH:
        made = config(tmp_path, "spare", kind, world, steps=7, file=LATE)
        made["parallel"] |= {"find_unused": True} if kind == "ddp" else {}
        ranks(world, run_on_rank, made)
        history = (tmp_path / f"spare-{kind}-{world}" / "history.jsonl").read_text()
        names = "network.first.spare.bias, network.first.spare.weight"
        assert f"{names} had no gradient in the first 5 steps" in history, kind
    ranks(1, run_on_rank, config(tmp_path / "held", "config", "single", 1, steps=7, unfreeze={"online": 7}))
    assert "no gradient" not in (tmp_path / "held" / "config-single-1" / "history.jsonl").read_text()


def test_a_declared_copy_gives_one_digest(ranks, tmp_path):
    summaries = [ranks(world, run_on_rank, config(tmp_path, "declared", kind, world))[0] for kind, world in SPREADS]
    assert len({summary["digest"] for summary in summaries}) == 1
    assert all(summary["findings"] == [] for summary in summaries)


class Targeted(Network):
    """Two copies of a layer: a moving average of it, and what it was every second step."""

    def __init__(self):
        super().__init__()
        self.slow, self.old = nn.Linear(7 * 16, 31), nn.Linear(7 * 16, 31)
        declared = averaged(self, {"slow": ("third", 0.7), "old": ("third", 0, 2)})
        names = {f"network.{name}": name for name, _ in self.named_parameters()}
        self._lockstep_averages = tuple(
            Averaged(copy=names[a.copy], source=names[a.source], momentum=a.momentum, every=a.every) for a in declared
        )

    def forward(self, batch):
        x = self.second(self.first(batch["image"] / 255)).flatten(1)
        return self.head(torch.relu(self.third(x) + self.slow(x) - self.old(x)) + self.frozen.sum() + self.gain.sum())

    def blocks(self):
        return [self.first, self.second]


def copies_on_rank(kind, parallel):
    """The whole layers before and after each of four steps."""
    state, fetched, _ = prepared((Targeted, images), kind, parallel, {})
    read = lambda: {  # noqa: E731
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in state.strategy.state().items()
        if name.endswith(("slow.weight", "old.weight", "third.weight"))
    }
    found = [read()]
    for micro_batches in fetched(state.strategy.owned, 0, 4).steps():
        step(state, micro_batches, clip=0.5)
        found.append(read())
    return found


def test_copies_follow_as_in_plain_pytorch(ranks):
    """slow = 0.7 slow + 0.3 third after every step; old = third after every second one."""
    (alone,) = ranks(1, copies_on_rank, "single", {})
    slow, old = alone[0]["slow.weight"], alone[0]["old.weight"]
    for number, found in enumerate(alone[1:], 1):
        slow = 0.7 * slow + 0.3 * found["third.weight"]
        old = found["third.weight"] if number % 2 == 0 else old
        torch.testing.assert_close(found["slow.weight"], slow)
        assert torch.equal(found["old.weight"], old)
    for kind, world in SPREADS[1:]:
        for found in ranks(world, copies_on_rank, kind, {}):
            assert all(torch.equal(a[n], b[n]) for a, b in zip(alone, found, strict=True) for n in a), (kind, world)


def test_a_copy_keeps_its_whole_numbers():
    module = nn.ModuleDict({name: nn.Linear(2, 3) for name in ("online", "target")})
    for part in module.values():
        part.index = nn.Parameter(torch.tensor([123_456_789]), requires_grad=False)
    assert [each.copy for each in averaged(module, {"target": ("online", 0.9)})] == [
        "network.target.weight",
        "network.target.bias",
    ]


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"target": ("online", 2)}, "a momentum of 0 to 1"),
        ({"targets": ("online", 0.9)}, "no parameter and no module with parameters named 'targets'"),
        ({"target": ("head", 0.9)}, "has no parameter head.0.weight of its shape to follow"),
    ],
)
def test_a_wrong_declaration_is_told(rules, says):
    module = nn.ModuleDict({name: nn.Sequential(nn.Linear(2, 3)) for name in ("online", "target")})
    with pytest.raises(ModelError, match=says):
        averaged(module, rules)


def test_weights_are_trained_from_a_step_on(ranks, tmp_path):
    """As the config says: one digest; another one than with another step; none of the frozen weights moves before."""
    digests = {}
    for when, spreads in ((3, SPREADS), (5, SPREADS[:1])):
        for kind, world in spreads:
            made = config(tmp_path / str(when), "config", kind, world, unfreeze={"online": when})
            digests.setdefault(when, set()).add(ranks(world, run_on_rank, made)[0]["digest"])
    frozen = config(tmp_path, "config", "ddp", 2, freeze=["online"])
    never = ranks(2, run_on_rank, frozen)[0]["digest"]
    assert len(digests[3]) == 1
    assert digests[3] != digests[5]
    assert never is not None
