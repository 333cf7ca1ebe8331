"""The optimizer's groups, and the learning rate as a function of the step alone."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer imports it, which sets a variable: better here than inside a test
from pydantic import ValidationError
from torch import nn

from lockstep.base import trust, user_code
from lockstep.base.errors import ConfigError
from lockstep.core.reduction import gradient_norm
from lockstep.core.reduction.gradient_norm import average_, row_squares
from lockstep.training import optim
from lockstep.training.learning_rate import checked_factor, learning_rate, own_schedule, set_learning_rate
from lockstep.training.optim import rules_of
from lockstep.training.optim_config import OptimSection, ScheduleSection, Shape
from lockstep.training.state import MovingAverage


def build(config, module):
    return optim.build(config, module, rules_of(config, module))


def rates(total_steps, *, shape="constant", warmup=0.0, global_batch=32, base_batch=None, **schedule):
    section = OptimSection(lr=0.1, base_batch=base_batch)
    schedule = ScheduleSection(shape=shape, warmup=warmup, **schedule)
    return [
        learning_rate(section, schedule, step=step, total_steps=total_steps, global_batch=global_batch)
        for step in range(total_steps)
    ]


@pytest.mark.parametrize(
    ("base_batch", "global_batch", "peak"), [(None, 512, 0.1), (64, 64, 0.1), (64, 512, 0.8), (64, 16, 0.025)]
)
def test_linear_rule(base_batch, global_batch, peak):
    assert rates(3, base_batch=base_batch, global_batch=global_batch) == pytest.approx([peak] * 3)


@pytest.mark.parametrize(("warmup", "steps"), [(0.0, 0), (0.25, 10), (0.99, 40), (1, 1), (5, 5), (40, 40)])
def test_warmup_is_a_fraction_or_a_number_of_steps(warmup, steps):
    found = rates(40, warmup=warmup)
    expected = [0.1 * (step + 1) / steps for step in range(steps)] + [0.1] * (40 - steps)
    assert found == pytest.approx(expected)
    assert found[0] > 0


@pytest.mark.parametrize("warmup", [0, 4])
def test_linear_goes_down_to_zero_on_a_line(warmup):
    after = rates(24, shape="linear", warmup=warmup)[warmup:]
    assert after == pytest.approx([0.1 * (1 - step / len(after)) for step in range(len(after))])
    assert after[-1] > 0


@pytest.mark.parametrize("warmup", [0, 4])
def test_cosine_is_the_schedule_of_torch(warmup):
    after = rates(24, shape="cosine", warmup=warmup)[warmup:]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(after))
    expected = []
    for _ in after:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert after == pytest.approx(expected)
    assert after[len(after) // 2] == pytest.approx(0.05)


def rates_of_torch(total_steps, make):
    """Of a scheduler of torch or transformers, for a peak of 0.1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler, found = make(optimizer), []
    for _ in range(total_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_one_cycle_is_that_of_torch():
    expected = rates_of_torch(
        50, lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 0.1, total_steps=50, pct_start=0.3)
    )
    assert rates(50, shape="one_cycle", warmup=0.3) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_polynomial_is_that_of_torch(power):
    expected = rates_of_torch(20, lambda each: torch.optim.lr_scheduler.PolynomialLR(each, total_iters=20, power=power))
    assert rates(20, shape="polynomial", power=power) == pytest.approx(expected)


def test_inverse_sqrt_is_that_of_transformers():
    """From the end of the warm-up on; they count the steps from 0."""
    from transformers import get_inverse_sqrt_schedule

    expected = rates_of_torch(101, lambda each: get_inverse_sqrt_schedule(each, num_warmup_steps=8))
    assert rates(100, shape="inverse_sqrt", warmup=8) == pytest.approx(expected[1:])


def test_wsd_stays_at_the_peak_and_then_goes_down_by_a_root():
    found = rates(40, shape="wsd", warmup=4, decay=10, final=0.1)
    assert found[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert found[4:31] == pytest.approx([0.1] * 27)
    assert found[31:] == pytest.approx([0.01 + 0.09 * (1 - math.sqrt(done / 10)) for done in range(1, 10)])
    assert rates(40, shape="wsd", decay=0.25) == pytest.approx(rates(40, shape="wsd", decay=10))


@pytest.mark.parametrize("shape", ["linear", "cosine", "polynomial", "wsd"])
def test_final_is_where_it_ends(shape):
    section, schedule = OptimSection(lr=0.1), ScheduleSection(shape=shape, final=0.2)
    ends = [learning_rate(section, schedule, step=step, total_steps=50, global_batch=1) for step in (0, 50, 70)]
    assert ends == pytest.approx([0.1, 0.02, 0.02])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_never_rises_after_warmup_and_ends_at_zero(shape):
    found = rates(50, shape=shape, warmup=0.1)
    assert found[:5] == sorted(found[:5])
    assert found[5:] == sorted(found[5:], reverse=True)
    end = learning_rate(OptimSection(), ScheduleSection(shape=shape), step=50, total_steps=50, global_batch=1)
    beyond = learning_rate(OptimSection(), ScheduleSection(shape=shape), step=99, total_steps=50, global_batch=1)
    assert end == beyond == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("shape", [shape for shape in get_args(Shape) if shape != "user"])
def test_depends_on_the_step_alone(shape):
    """Asked for in any order, any number of times, the answers are the same: nothing is counted inside."""
    forward = rates(30, shape=shape, warmup=0.2)
    section, schedule = OptimSection(lr=0.1), ScheduleSection(shape=shape, warmup=0.2)
    for step in [29, 3, 3, 17, 0, *reversed(range(30))]:
        rate = learning_rate(section, schedule, step=step, total_steps=30, global_batch=32)
        assert rate == forward[step]


@pytest.mark.parametrize("total_steps", [1, 2, 5])
def test_a_run_shorter_than_its_warmup_keeps_rising(total_steps):
    found = rates(total_steps, shape="cosine", warmup=10)
    assert found == pytest.approx([0.1 * (step + 1) / 10 for step in range(total_steps)])


def test_very_small_and_very_long_runs_are_finite():
    for shape in ("linear", "cosine", "constant"):
        assert all(math.isfinite(rate) and rate > 0 for rate in rates(1, shape=shape, warmup=0.5))
        far = learning_rate(
            OptimSection(), ScheduleSection(shape=shape), step=10**12, total_steps=2 * 10**12, global_batch=1
        )
        assert 0 < far <= 1e-3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.linear = nn.Linear(4, 4)
        self.layer_norm, self.batch_norm = nn.LayerNorm(4), nn.BatchNorm2d(2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def names_in(module, group):
    own = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in module.named_parameters() if id(parameter) in own}


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_norms_and_biases_are_not_decayed(kind):
    net = Net()
    optimizer = build(OptimSection(kind=kind, weight_decay=0.3), net)
    groups = {group["weight_decay"]: names_in(net, group) for group in optimizer.param_groups}
    assert groups == {
        0.3: {"embedding.weight", "conv.weight", "linear.weight"},
        0.0: {
            *("conv.bias", "linear.bias", "scale"),
            *("layer_norm.weight", "layer_norm.bias", "batch_norm.weight", "batch_norm.bias"),
        },
    }
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_adagrad_is_fused_where_torch_has_that(device):
    """The arguments alone: they need no GPU."""
    section = OptimSection(kind="adagrad")
    rule = optim.ParameterRule(kind="adagrad", section=section, lr_scale=1.0, weight_decay=0.0)
    has_it = device == "cpu" or torch.__version__ >= "2.12"
    assert optim._arguments(rule, section, torch.device(device)) == ({"fused": True} if has_it else {})


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_decay_shrinks_matrices_only(kind):
    net = nn.Linear(3, 3)
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.bias.fill_(1.0)
    optimizer = build(OptimSection(kind=kind, lr=0.5, weight_decay=0.2), net)
    net.weight.grad, net.bias.grad = torch.zeros_like(net.weight), torch.zeros_like(net.bias)
    optimizer.step()
    assert torch.allclose(net.weight, torch.full((3, 3), 0.9))
    assert torch.equal(net.bias, torch.ones(3))


@pytest.mark.parametrize("model", [nn.LayerNorm(3), nn.Linear(3, 3, bias=False)])
def test_a_group_without_parameters_is_left_out(model):
    assert len(build(OptimSection(), model).param_groups) == 1


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.8, weight_decay=0.1)),
    ],
)
def test_updates_are_those_of_torch(kind, reference):
    """Fused or not, five steps of the same method."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Linear(6, 5, bias=False)
    other = torch.nn.Parameter(net.weight.detach().clone())
    ours = build(OptimSection(kind=kind, lr=0.01, momentum=0.8, beta2=0.95, weight_decay=0.1), net)
    theirs = reference([other])
    for _ in range(5):
        gradient = torch.randn(5, 6, generator=generator)
        net.weight.grad, other.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    assert torch.allclose(net.weight, other, atol=1e-6)
    assert not torch.allclose(net.weight, torch.zeros_like(other), atol=1e-3)


def test_set_learning_rate_reaches_every_group():
    optimizer = build(OptimSection(lr=1.0), Net())
    set_learning_rate(optimizer, 0.125)
    assert len(optimizer.param_groups) == 2
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        (OptimSection, "lr", 0.0),
        (OptimSection, "lr", float("nan")),
        (OptimSection, "momentum", 1.0),
        (OptimSection, "base_batch", 0),
        (OptimSection, "clip", 0.0),
        (OptimSection, "kind", "adamm"),
        (ScheduleSection, "warmup", -0.1),
        (ScheduleSection, "warmup", 7.4),
        (ScheduleSection, "warmup", 1e18),
        (OptimSection, "lr", 1e-320),
        (ScheduleSection, "shape", "cosin"),
    ],
)
def test_impossible_settings_are_refused(section, field, value):
    with pytest.raises(ValidationError) as caught:
        section(**{field: value})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
def test_averaging_and_clipping_are_those_of_pytorch(max_norm):
    """In one pass over gradients of any layout and size, also such as are larger than a core's cache."""
    torch.manual_seed(0)
    shapes = [(700, 400), (5, 3), (4, 2, 3, 3), (), (0, 7), (11,)]
    sums = [torch.randn(shape) for shape in shapes]
    sums[2] = sums[2].to(memory_format=torch.channels_last)
    expected = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter, total in zip(expected, sums, strict=True):
        parameter.grad = total / 37
    norm = torch.cat([parameter.grad.flatten() for parameter in expected]).double().norm().float()
    torch.nn.utils.clip_grad_norm_(expected, max_norm or math.inf)
    count = torch.tensor(37, dtype=torch.float64)
    found = average_(sums, row_squares(sums).sum().sqrt(), count=count, max_norm=max_norm)
    torch.testing.assert_close(found, norm)
    torch.testing.assert_close(sums, [parameter.grad for parameter in expected], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("columns", [1, 3, 16, 31, 384, 4099, 70_000])
def test_a_rows_square_does_not_depend_on_the_other_rows(columns):
    rows = torch.randn(7, columns)
    whole = row_squares([rows])
    rounding = torch.finfo(torch.float32).eps * max(2.0, math.sqrt(columns))  # of that many additions, at random
    torch.testing.assert_close(whole.double(), rows.double().square().sum(1), rtol=rounding, atol=0.0)
    for start in range(7):
        for end in range(start + 1, 8):
            assert torch.equal(row_squares([rows[start:end].clone()]), whole[start:end])


@pytest.mark.parametrize("max_value", [None, 0.05])
def test_gradients_scaled_together_have_the_bits_of_each_alone(max_value):
    """As a GPU scales them, of one dtype or several."""
    grads = [torch.randn(7, 5), torch.randn(3), torch.randn(4, 4).to(torch.bfloat16)]
    together, factor = [grad.clone() for grad in grads], torch.tensor(1 / 37, dtype=torch.float64)
    gradient_norm._scale_together(together, factor, max_value)
    for grad, found in zip(grads, together, strict=True):
        alone = grad.mul(factor.to(grad.dtype)) + 0.0
        assert torch.equal(found, alone if max_value is None else alone.clamp(-max_value, max_value))


@pytest.mark.parametrize("place", ["before", "after"])
def test_averages_leave_whole_numbers_as_they_are(place):
    """Such as indices: after other parameters they ended the run, before them large ones were rounded."""
    module = nn.Module()
    for name in ("index", "weight") if place == "before" else ("weight", "index"):
        value = torch.tensor([123_456_789]) if name == "index" else torch.ones(3)
        module.register_parameter(name, nn.Parameter(value, requires_grad=name == "weight"))
    average = MovingAverage(module, 0.9)
    with torch.no_grad():
        module.weight.zero_()
    average.update()
    with average.in_place():
        assert module.index.item() == 123_456_789
        assert torch.equal(module.weight, torch.full((3,), 0.9))


def own_file(folder, made):
    file = folder / "own.py"
    file.write_text(f"import torch\n\ndef optimizer(module, options):\n    return {made}\n")
    trust.own(trust.code_with_imports(file))
    return OptimSection(kind="user", file=file, lr=0.01)


@pytest.mark.parametrize("factor", [1, 0.5, np.float32(0.1), np.int64(2), np.array(0.25), torch.tensor(0.1)])
def test_a_factor_of_an_own_schedule_is_any_number(factor):
    found = checked_factor(factor, "schedule(0)")
    assert type(found) is float and found == factor


@pytest.mark.parametrize(
    "factor", ["1", None, -0.1, math.inf, pytest.param(10**400, id="huge"), torch.ones(2), np.ones(2), 1j]
)
def test_what_is_no_factor_is_told(factor):
    with pytest.raises(ConfigError, match=r"schedule\(0\) returned .*: it is a number, at least 0"):
        checked_factor(factor, "schedule(0)")


def test_functions_that_take_other_arguments_are_the_users_mistake(tmp_path):
    """Though the last frame of the error is one of ours."""
    file = tmp_path / "own.py"
    file.write_text("def optimizer():\n    return None\n\ndef schedule():\n    return 1.0\n")
    trust.own(trust.code_with_imports(file))
    schedule = own_schedule(ScheduleSection(shape="user", file=file), None)
    config = OptimSection(kind="user", file=file)
    calls = {"schedule.file": lambda: schedule(0, 1), "optim.file": lambda: optim.build_own(config, None, None)}
    for setting, call in calls.items():
        with pytest.raises(TypeError, match="takes 0 positional arguments") as caught:
            call()
        assert user_code.is_from_user(caught.value), setting
        assert user_code.report(caught.value).startswith(f"{setting}: "), setting


def test_lbfgs_as_an_own_optimizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="LBFGS, which runs the model more than once in a step"):
        optim.build_own(own_file(tmp_path, "torch.optim.LBFGS(module.parameters())"), nn.Linear(2, 1), None)


def test_a_parameter_of_an_own_optimizer_that_is_not_the_models_is_told(tmp_path):
    made = "torch.optim.SGD([*module.parameters(), torch.nn.Parameter(torch.ones(3))], lr=0.1)"
    with pytest.raises(ConfigError, match=r"a parameter of shape \[3\] that is not the model's"):
        optim.build_own(own_file(tmp_path, made), nn.Linear(2, 1), None)


def test_the_rate_of_an_own_optimizer_may_be_a_tensor(tmp_path):
    module = nn.Linear(2, 1)
    config = own_file(tmp_path, "torch.optim.SGD(module.parameters(), lr=torch.tensor(0.02))")
    optimizer = optim.build_own(config, module, None)
    optim.initialise(module, optimizer)
    set_learning_rate(optimizer, 0.005)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
