"""What an optimizer of the user's remembers outside of its state is found at the start; well-written ones pass."""

import math

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.base.errors import ConfigError
from lockstep.loop.script_optimizer import ScriptOptimizer
from lockstep.training import optim


class Momentum(Optimizer):
    """SGD with all it remembers in self.state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def update(self, p, lr):
        self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        p.sub_(self.state[p]["momentum"], alpha=lr)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"])


class Lion(Momentum):
    def update(self, p, lr):
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        p.sub_((0.9 * m + 0.1 * p.grad).sign(), alpha=lr)
        m.mul_(0.99).add_(p.grad, alpha=0.01)


class ScheduleFree(Momentum):
    """Its steps and its second point are tensors in self.state; a cache is an attribute."""

    def update(self, p, lr):
        state = self.state[p]
        if not state:
            state["z"], state["k"] = p.clone(), torch.zeros(())
        self.cache = {"roots": [math.sqrt(n) for n in range(9)]}
        self.calls = getattr(self, "calls", 0) + 1  # which no update reads
        state["k"] += 1
        state["z"].sub_(p.grad, alpha=lr)
        p.lerp_(state["z"], 1 / state["k"].item())


class Noisy(Momentum):
    """Langevin dynamics."""

    def update(self, p, lr):
        super().update(p, lr)
        p.add_(torch.randn_like(p), alpha=0.1 * lr)


class Counting(Momentum):
    every = 5

    def step(self, closure=None):
        self.t = getattr(self, "t", 0) + 1
        if self.t % self.every:
            super().step()


class Seldom(Counting):
    every = 100


class Warming(Momentum):
    """A schedule of its own, a tensor in the groups."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["rate"] = group.get("rate", torch.zeros(())) + 0.1 * (1 - group.get("rate", torch.zeros(())))
            for p in group["params"]:
                self.update(p, group["lr"] * float(group["rate"]))


class Lookahead(torch.optim.AdamW):
    """Its slow weights are an attribute, its count is in self.state."""

    slow = None

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        params = [p for group in self.param_groups for p in group["params"]]
        self.slow = self.slow or [p.clone() for p in params]
        for slow, p in zip(self.slow, params, strict=False):
            if int(self.state[p]["step"]) % 5 == 0:
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class Wrapping(Optimizer):
    """The optimizer inside keeps its own state."""

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, {"lr": 0.1})

    def step(self, closure=None):
        self.inner.step()


class Late(Momentum):
    """Makes its state in the fourth step."""

    def update(self, p, lr):
        self.state[p].setdefault("n", torch.zeros(())).add_(1)
        if self.state[p]["n"] > 4:
            super().update(p, lr)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def of_config(make, net):
    optimizer = make(net.parameters())
    for group in optimizer.param_groups:
        group["scale"] = 1.0
    optim.initialise(net, optimizer)


def of_script(make, net):
    ScriptOptimizer(net, make(net.parameters()), None)


WELL = [Momentum, Lion, ScheduleFree, Noisy, torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam]


@pytest.mark.parametrize("use", [of_config, of_script])
@pytest.mark.parametrize("make", WELL)
def test_what_is_in_the_state_is_enough(make, use):
    net = network()
    before, drawn = {name: p.clone() for name, p in net.state_dict().items()}, torch.get_rng_state()
    use(make, net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()) or make is Noisy
    assert torch.equal(torch.get_rng_state(), drawn) or make is Noisy


@pytest.mark.parametrize(
    ("make", "use", "says"),
    [
        (
            Counting,
            of_config,
            r"Counting remembers something that no checkpoint holds .*self\.t.* self\.state\[parameter\]",
        ),
        (Counting, of_script, "Counting remembers"),
        (Seldom, of_config, r"Seldom remembers .*self\.t"),
        (Lookahead, of_config, r"Lookahead remembers .*self\.slow"),
        (Lookahead, of_script, "Lookahead remembers"),
        (Wrapping, of_config, "Wrapping remembers"),
        (Wrapping, of_script, "Wrapping remembers"),
        (Warming, of_config, "Warming remembers"),
        (Late, of_config, "Late remembers .* its first step makes"),
    ],
)
def test_what_would_be_lost_is_refused(make, use, says):
    with pytest.raises(ConfigError, match=says):
        use(make, network())


def test_options_of_the_groups_are_kept_for_a_script():
    of_script(Warming, network())
