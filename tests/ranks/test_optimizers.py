"""Every class of torch.optim, several in one run, groups by pattern, frozen parameters and users' own optimizers."""

import copy
import json
import re
from typing import get_args

import pytest
import torch
from members import further
from optimizer_runs import train_on_rank
from running import lockstep, started, summary, wait_for_steps
from torch import nn

from lockstep.base.errors import ConfigError
from lockstep.base.name_patterns import matching
from lockstep.base.world import World
from lockstep.recipe import build
from lockstep.recipe import recipe as recipes
from lockstep.training import optim
from lockstep.training.optim import rules_of
from lockstep.training.optim_config import KINDS, WHOLE_TENSORS, OptimSection, Shape
from lockstep.training.step import step

CONFIG = {
    "data": {"kind": "digits", "limit": 64},
    "model": {"kind": "cnn"},
    "train": {"epochs": 3, "global_batch": 16, "micro_batch": 4},
    "optim": {"lr": 0.01},
}
ELEMENTWISE = [kind for kind in KINDS if kind not in WHOLE_TENSORS]


def built(section, module):
    optimizer = optim.build(section, module, rules_of(section, module))
    optim.initialise(module, optimizer)
    return optimizer


def test_all_classes_of_torch_are_known():
    found = {name.lower() for name, each in vars(torch.optim).items() if isinstance(each, type)}
    assert set(KINDS) == found - {"optimizer", "lbfgs", "sparseadam"}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_a_plain_loop(kind):
    """From the first on: the state that is made beforehand is that which a first step would make."""
    torch.manual_seed(0)
    net = nn.Linear(7, 5, bias=False)
    plain = copy.deepcopy(net)
    lr = 0.01
    ours = built(OptimSection(kind=kind, lr=lr, weight_decay=0.0), net)
    options = {"momentum": 0.9} if kind == "sgd" else {"adjust_lr_fn": "match_rms_adamw"} if kind == "muon" else {}
    options |= {} if kind in ("rprop",) else {"weight_decay": 0.0}
    theirs = optim.CLASSES[kind](plain.parameters(), lr=lr, **options)
    for _ in range(5):
        gradient = torch.randn(5, 7)
        net.weight.grad, plain.weight.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(net.weight, plain.weight, rtol=1e-6, atol=1e-7)
    assert (net.weight - copy.deepcopy(nn.Linear(7, 5)).weight).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_a_part_of_a_tensor_is_updated_as_in_the_whole(kind):
    """Wherever a shard ends: fsdp and tensor hold parts."""
    torch.manual_seed(0)
    start, cuts = torch.randn(41, 25), (0, 1, 9, 23, 41)
    whole, pieces = (
        nn.ParameterList([start.clone()]),
        nn.ParameterList([start[a:b].clone() for a, b in zip(cuts, cuts[1:], strict=False)]),
    )
    section = OptimSection(kind=kind, lr=0.01, weight_decay=0.1)
    optimizers = [built(section, module) for module in (whole, pieces)]
    for _ in range(4):
        gradient = torch.randn(41, 25)
        whole[0].grad = gradient.clone()
        for piece, a, b in zip(pieces, cuts, cuts[1:], strict=False):
            piece.grad = gradient[a:b].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat(list(pieces)), whole[0])


GPT = {"data": {"kind": "text", "context": 8}, "model": {"kind": "gpt", "layers": 2, "width": 16, "heads": 2}}
EVERYWHERE = ((2, "ddp"), (3, "ddp"), (2, "fsdp"), (2, "pipeline"))


@pytest.mark.parametrize(
    ("settings", "worlds"),
    [
        ({"optim": {"kind": "rmsprop", "options": {"momentum": 0.5}}}, EVERYWHERE),
        ({"optim": {"kind": "nadam", "lr": 0.002}}, EVERYWHERE[1:2]),
        (
            GPT | {"optim": {"kind": "muon", "groups": [{"match": "head", "kind": "sgd", "lr": 0.1}]}},
            ((2, "pipeline"),),
        ),
        ({"optim": {"kind": "adafactor"}}, ((2, "ddp"), (3, "ddp"), (2, "pipeline"))),
        (
            {"optim": {"clip": None, "clip_value": 1e-3}, "train": {"label_smoothing": 0.1, "precision": "fp16"}},
            EVERYWHERE,
        ),
        (
            GPT | {"optim": {"layer_decay": 0.5, "groups": [{"match": "*norm*", "lr": 0.1, "weight_decay": 0.3}]}},
            EVERYWHERE[2:],
        ),
        ({"model": {"freeze": ["features", "*.bias"]}}, EVERYWHERE[:3]),
        ({"model": {"freeze": "head"}}, EVERYWHERE[:3]),
        (
            GPT | {"schedule": {"shape": "wsd", "warmup": 2, "decay": 4}, "train": {"label_smoothing": 0.2}},
            ((2, "ddp"),),
        ),
        *further(
            *(({"schedule": {"shape": each, "warmup": 2}}, ((2, "ddp"),)) for each in get_args(Shape) if each != "user")
        ),
    ],
    ids=lambda each: re.sub(r"\W+", "-", json.dumps(each)).strip("-")[:60] if isinstance(each, dict) else "",
)
def test_equal_bits(ranks, settings, worlds):
    """On one and several processes, by each strategy that can."""
    config = {name: CONFIG.get(name, {}) | settings.get(name, {}) for name in CONFIG | settings}
    plain = (
        {name: CONFIG.get(name, {}) | GPT.get(name, {}) for name in CONFIG}
        if "kind" in settings.get("data", {})
        else CONFIG
    )
    ((first, last),) = ranks(1, train_on_rank, config)
    assert first != last != ranks(1, train_on_rank, plain)[0][1]
    for world, kind in worlds:
        found = ranks(world, train_on_rank, config | {"parallel": {"kind": kind}})
        assert found == [(first, last)] * world, (world, kind)


def weights_of(config):
    """Before and after training on one process."""
    recipe = recipes.of_sections(config)
    parts = build.assemble(recipe, World(), torch.device("cpu"))
    before = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    for micro_batches in parts.steps(0):
        step(parts.state, micro_batches, clip=recipe.optim.clip)
    return before, dict(parts.model.named_parameters()), parts


def test_frozen_parameters_stay(lone):
    config = CONFIG | {"model": {"kind": "cnn", "freeze": ["features.conv1", "*.bias"]}}
    before, after, parts = weights_of(config)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"features.conv2.weight", "head.fc1.weight", "head.fc2.weight"}
    assert len(parts.state.optimizer.state) == 3


def test_the_rates_of_groups_and_layers(lone):
    groups = [
        {"match": ["layers.1", "head.*"], "weight_decay": 0.0},
        {"match": "*norm*", "lr": 0.1, "weight_decay": 0.3},
    ]
    short = {"data": CONFIG["data"] | GPT["data"], "train": {"steps": 3, "global_batch": 16}}
    config = GPT | short | {"optim": {"lr": 0.01, "weight_decay": 0.2, "layer_decay": 0.5, "groups": groups}}
    _, _, parts = weights_of(config | {"schedule": {"shape": "constant"}})
    names = {id(p): name for name, p in parts.model.named_parameters()}
    found = {
        names[id(p)]: (group["lr"], group["weight_decay"])
        for group in parts.state.optimizer.param_groups
        for p in group["params"]
    }
    assert found["embedding.weight"] == pytest.approx((0.01 / 8, 0.2))
    assert found["layers.0.attention.query.weight"] == pytest.approx((0.01 / 4, 0.2))
    assert found["layers.0.norm_1.weight"] == pytest.approx((0.1 / 4, 0.3))
    assert found["layers.1.norm_1.weight"] == found["layers.1.feed_forward.up.weight"] == pytest.approx((0.005, 0.0))
    assert found["head.linear.weight"] == pytest.approx((0.01, 0.0))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"model": {"freeze": ["head.fc3"]}},
            "model.freeze: 'head.fc3' matches no parameter or module .* did you mean 'head.fc.'?",
        ),
        ({"model": {"freeze": "*"}}, "there is nothing to train: .*model.freeze"),
        ({"optim": {"groups": [{"match": "haed"}]}}, "optim.groups.0.match: 'haed' matches no .* did you mean 'head'"),
        ({"optim": {"kind": "adamm"}}, "there is no 'adamm' . did you mean 'adam'"),
        ({"optim": {"kind": "adam", "options": {"beta": 1}}}, "adam has no option 'beta' .it has: betas, eps"),
        ({"optim": {"kind": "rmsprop", "options": {"alpha": -1}}}, "rmsprop does not take these options: .*alpha"),
        ({"optim": {"layer_decay": 0.9}}, "optim.layer_decay: the model has no numbered modules"),
        ({"optim": {"kind": "muon"}, "parallel": {"kind": "fsdp"}}, "muon needs whole parameters"),
        ({"optim": {"kind": "user"}}, "optim.kind=user needs optim.file"),
        ({"optim": {"file": "x.py"}}, "file has the optimizer of kind=user, but kind is adamw"),
        ({"schedule": {"shape": "user"}}, "schedule.shape=user needs schedule.file"),
        ({"schedule": {"shape": "one_cycle"}}, "set warmup to the length of the rise"),
        (
            {"schedule": {"shape": "wsd", "warmup": 8, "decay": 8}, "train": {"steps": 10}},
            "are 16 steps, more than the run",
        ),
    ],
)
def test_mistakes_are_answered_with_the_repair(lone, settings, says):
    config = {name: CONFIG.get(name, {}) | settings.get(name, {}) for name in CONFIG | settings}
    if "steps" in config["train"]:
        config["train"] = {"steps": 10}
    with pytest.raises(ConfigError, match=re.compile(says, re.DOTALL)):
        build.assemble(recipes.of_sections(config), World(), torch.device("cpu"))


OWN = """
import torch
from torch.optim import Optimizer


class Signs(Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"], state["step"] = torch.zeros_like(p), torch.zeros(())
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(state["momentum"].sign(), alpha=-group["lr"] / (1 + 0.01 * state["step"].item()))


def optimizer(module, options):
    small = [p for p in module.parameters() if p.ndim < 2]
    large = [p for p in module.parameters() if p.ndim > 1]
    return Signs([{"params": large}, {"params": small, "lr": options["lr"] / 2}], lr=options["lr"])


def schedule(step, total_steps):
    return 1.0 if step < total_steps // 2 else 0.1
"""


def test_an_optimizer_and_a_schedule_of_the_users(tmp_path):
    """The same bits on one and two processes, also after a kill in mid-schedule."""
    (tmp_path / "own.py").write_text(OWN)
    config = CONFIG | {
        "optim": {"kind": "user", "file": "own.py", "options": {"lr": 0.002}, "lr": 0.002},
        "schedule": {"shape": "user", "file": "own.py"},
        "train": {"steps": 40, "global_batch": 16, "micro_batch": 4},
        "checkpoint": {"every_steps": 5},
        "observe": {"log_every": 1},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    done = lockstep(tmp_path, "train", "c.yaml", "run.name=w1", "launch.processes=1")
    assert done.returncode == 0, done.stdout + done.stderr
    killed = started(tmp_path, "train", "c.yaml", "run.name=killed", "launch.processes=2")
    wait_for_steps(tmp_path / "runs" / "killed", 11)
    killed.kill()
    killed.communicate(timeout=30)
    done = lockstep(tmp_path, "train", "c.yaml", "run.name=killed", "launch.processes=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({summary(tmp_path, name)["digest"] for name in ("w1", "killed")}) == 1
    lines = map(json.loads, (tmp_path / "runs" / "w1" / "metrics.jsonl").read_text().splitlines())
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert rates == [0.002] * 20 + [0.0002] * 20


NOISY = """
import numpy as np
import torch


class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


def optimizer(module, options):
    return Langevin(module.parameters(), lr=0.001)


def schedule(step):
    return np.random.uniform(0.5, 1)
"""


def test_random_numbers_of_an_optimizer_and_a_schedule_are_those_of_the_step(ranks, tmp_path):
    """Not of the micro-batches that a process ran before; where processes hold other weights, they are refused."""
    (tmp_path / "own.py").write_text(NOISY)
    file = str(tmp_path / "own.py")
    own = {"optim": {"kind": "user", "file": file}, "schedule": {"shape": "user", "file": file}}
    config = CONFIG | own | {"train": {"steps": 3, "global_batch": 16, "micro_batch": 4}}
    (alone,) = ranks(1, train_on_rank, config)
    assert ranks(2, train_on_rank, config) == [alone] * 2
    for said in ranks(2, refused_on_rank, config | {"parallel": {"kind": "pipeline"}}):
        assert "Langevin draws random numbers" in said and "parallel.kind=ddp" in said


def refused_on_rank(config):
    with pytest.raises(ConfigError) as refusal:
        train_on_rank(config)
    return str(refusal.value)


def test_the_first_part_of_a_name_may_be_left_out_where_nothing_has_the_whole():
    names = ["bert.encoder.weight", "bert.head.bias", "head.weight"]
    assert matching(["encoder"], names, setting="s") == {"bert.encoder.weight"}
    assert matching(["head"], names, setting="s") == {"head.weight"}
    assert matching(["enc*.weight", "bert.head"], names, setting="s") == {"bert.encoder.weight", "bert.head.bias"}
    with pytest.raises(ConfigError, match="'weight2' matches no parameter"):
        matching(["weight2"], names, setting="s")
