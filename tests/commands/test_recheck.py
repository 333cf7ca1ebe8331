"""observe.recheck: a process whose bits flip is named, and leaves the run, or ends it."""

import pytest
from running import lockstep, summary

CONFIG = """
data: {limit: 400}
model: {kind: user, file: model.py}
train: {epochs: null, steps: 30, global_batch: 32, micro_batch: 8}
checkpoint: {every_steps: 5}
"""
FLIPPING = """
import os
from pathlib import Path

import torch

from lockstep.models import _cnn as cnn


class Flips:
    def __init__(self, module):
        self.module, self.real, self.calls = module, module.forward, 0
        self.file = Path(__file__).with_name("rank")

    def forward(self, inputs):
        self.calls += self.module.training
        outputs = self.real(inputs)
        if self.calls > 30 and self.file.exists() and os.environ["RANK"] == self.file.read_text():
            outputs = outputs.clone()
            outputs.detach().view(-1)[:32].view(torch.int32).bitwise_xor_(1 << 22)
        return outputs


def build(options, spec):
    network = cnn.build(cnn.Config(kind="cnn"), spec)
    network.head.fc1.forward = Flips(network.head.fc1).forward
    return network
"""
MODULE = "the first module with other outputs is network.head.fc1 (torch.nn.Linear)"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "model.py").write_text(FLIPPING)
    return tmp_path


def train(folder, name, *words):
    return lockstep(folder, "train", "c.yaml", f"run.name={name}", *words)


@pytest.mark.core
def test_the_run_ends_with_the_ranks_name_and_goes_on_without_it(folder):
    assert train(folder, "plain", "launch.processes=1").returncode == 0
    three = ["launch.processes=3", "observe.recheck=1", "launch.recovery=restart"]
    (folder / "rank").write_text("1")
    done = train(folder, "a", *three)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("rank 1 on ") == 1, done.stderr
    assert "computes wrongly: its gradients of shard" in done.stderr and MODULE in done.stderr, done.stderr
    assert "observe.on_corruption=warn" in done.stderr
    (folder / "rank").unlink()
    again = train(folder, "a", *three)
    assert again.returncode == 0, again.stdout + again.stderr
    assert summary(folder, "a")["digest"] == summary(folder, "plain")["digest"]


def test_with_live_recovery_it_leaves_for_good(folder):
    assert train(folder, "plain", "launch.processes=1").returncode == 0
    (folder / "rank").write_text("1")
    done = train(folder, "live", "launch.processes=3", "launch.recovery=live", "observe.recheck=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It leaves the run, which goes on with the right gradients" in done.stdout, done.stdout + done.stderr
    found = summary(folder, "live")
    assert found["digest"] == summary(folder, "plain")["digest"]
    assert found["world_size"] == 2 and [each["world_size"] for each in found["regrouped"]] == [2]
    assert "has left the run" in found["regrouped"][0]["losses"][0]
