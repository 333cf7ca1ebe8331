"""observe.recheck: a process whose bits flip is named, and leaves the run, or ends it."""

import pytest
from running import lockstep, started, summary, wait_for_steps, workers

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


def written(folder):
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "model.py").write_text(FLIPPING)
    return folder


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path)


def train(folder, name, *words):
    return lockstep(folder, "train", "c.yaml", f"run.name={name}", *words)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The digest of a run without rechecks, on one process."""
    folder = written(tmp_path_factory.mktemp("plain"))
    assert train(folder, "plain", "launch.processes=1").returncode == 0
    return summary(folder, "plain")["digest"]


@pytest.mark.core
def test_the_run_ends_with_the_ranks_name_and_goes_on_without_it(folder, plain):
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
    assert summary(folder, "a")["digest"] == plain


def test_with_live_recovery_it_leaves_for_good(folder, plain):
    (folder / "rank").write_text("1")
    done = train(folder, "live", "launch.processes=3", "launch.recovery=live", "observe.recheck=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It leaves the run, which goes on with the right gradients" in done.stdout, done.stdout + done.stderr
    found = summary(folder, "live")
    assert found["digest"] == plain
    assert found["world_size"] == 2 and [each["world_size"] for each in found["regrouped"]] == [2]
    assert "has left the run" in found["regrouped"][0]["losses"][0]


def test_a_process_may_be_lost_in_any_run_of_a_step(folder, plain):
    words = ["launch.processes=3", "launch.recovery=live", "observe.recheck=1", "observe.log_every=1"]
    process = started(folder, "train", "c.yaml", "run.name=lost", *words, "data.workers=1")
    for step in (3, 9, 14):
        wait_for_steps(folder / "runs" / "lost", step)
        workers(process)[step % 3].kill()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and "Traceback" not in output, output
    found = summary(folder, "lost")
    assert found["digest"] == plain and found["regrouped"] and "found" not in found["rechecked"]
