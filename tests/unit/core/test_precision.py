"""What may change bits is set for every thread, and is said."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from lockstep.base.errors import ModelError
from lockstep.core.numerics.precision import Precision, check_format
from lockstep.training.step import explained_nondeterminism

PROGRAM = """
import torch
from torch.utils.data import DataLoader
from lockstep.core.numerics.precision import fix_numerics

class Tiny(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.full((1000,), 1e-40) * 1

facts = fix_numerics(threads=4, exact=True)
assert facts["denormals_flushed"] and facts["threads"] == torch.get_num_threads() == 4
weight = torch.full((1 << 20,), 1e-30, requires_grad=True)
(weight * 1e-10).sum().backward(torch.tensor(1e-30))          # 1e-40 in every element, forwards and backwards
for name, values in {
    "forward": weight.detach() * 1e-10,
    "backward": weight.grad,
    "loader": torch.cat(list(DataLoader(Tiny(), num_workers=2))),
}.items():
    print(name, torch.count_nonzero(values).item())
"""


def test_denormals_are_flushed_in_every_thread():
    """Four threads share a million numbers: one thread that keeps denormals would leave a quarter of them."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["forward", "0", "backward", "0", "loader", "0"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast_to_the_format_that_was_asked_for(kind, dtype):
    layer = torch.nn.Linear(4, 4)
    with Precision(kind, torch.device("cpu")).autocast():
        assert layer(torch.ones(2, 4)).dtype == dtype


def test_a_cpu_is_no_device_for_tf32(tmp_path):
    """Also where a script has a loop of its own; what is trained elsewhere can be used here."""
    (tmp_path / "c.yaml").write_text("data: {kind: digits, limit: 40}\nmodel: {kind: cnn}\nrun: {device: cpu}\n")
    command = [sys.executable, "-m", "lockstep", "train", "c.yaml", "train.precision=tf32", "launch.processes=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("train.precision=tf32: only GPUs round")) == (2, 1), done.stderr
    for kind in ("fp32", "bf16", "fp16"):
        check_format(kind, torch.device("cpu"))
    check_format("tf32", torch.device("cuda"))


def test_overflow_of_scaled_gradients_leaves_the_step_out_and_lowers_the_scale():
    precision = Precision("fp16", torch.device("cpu"))
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    before = precision.scaler.get_scale()
    for factor, expected in ((float("inf"), 1.0), (1.0, 0.0)):
        precision.scaled((weight * factor).sum()).backward()
        precision.unscale(optimizer)
        precision.apply(optimizer)
        optimizer.zero_grad()
        assert weight.tolist() == [expected] * 3
    assert precision.state_dict()["scale"] == before / 2
    again = Precision("fp16", torch.device("cpu"))
    again.load_state_dict(precision.state_dict())
    assert again.scaler.get_scale() == before / 2


@pytest.mark.parametrize(("targets", "scale"), [(1, 2.0**16), (2, 2.0**15), (8, 2.0**13), (9, 2.0**12), (1024, 64.0)])
def test_the_first_scale_is_smaller_for_a_sum_over_more(targets, scale):
    """A power of two, so that it changes no digit."""
    assert Precision("fp16", torch.device("cpu"), targets=targets).state_dict()["scale"] == scale


class Put(nn.Module):
    def forward(self, x):
        return x.clone().put_(torch.tensor([0]), x[:1])


def test_an_operation_without_a_deterministic_form_is_named():
    module = nn.Sequential(Put())
    torch.use_deterministic_algorithms(True)
    try:
        with (
            pytest.raises(ModelError, match=r"put_ of 0 \(Put\) gives other bits .* set run.reproducibility=fast"),
            explained_nondeterminism(module),
        ):
            module(torch.ones(3))
    finally:
        torch.use_deterministic_algorithms(False)
