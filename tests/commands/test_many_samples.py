"""Data of 10^8 samples that are computed: the weights of any number of processes, also after a kill in mid-epoch."""

import numpy as np
import pytest
from running import lockstep, started, summary, wait_for_steps, workers

from lockstep.data.order import permuted
from lockstep.data.sampler import EvaluationRequests

VIRTUAL = """
import time

import numpy as np
from torch import nn

from lockstep import DataSpec


class Virtual:
    lengths, spec = None, DataSpec(modality="table", labels=("low", "high"))

    def __init__(self, samples, pause):
        self.samples, self.pause = samples, pause

    def __len__(self):
        return self.samples

    def __getitems__(self, indices):
        time.sleep(self.pause)
        x = np.sin(np.outer(indices, np.arange(1, 9)) * 0.37).astype(np.float32)
        return {"x": x, "label": (x[:, 0] > 0).astype(np.int64)}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, batch):
        return self.head(batch["x"])


def source(options, split):
    return Virtual(10**8 if split == "train" else 50, options["pause"])


def build(options, spec):
    return Network()
"""
CONFIG = """
data: {kind: user, file: virtual.py, options: {pause: 0}}
model: {kind: user, file: virtual.py}
train: {steps: 60, global_batch: 32, micro_batch: 8}
checkpoint: {every_steps: 4}
observe: {log_every: 1}
launch: {max_restarts: 0}
"""


@pytest.mark.matrix
def test_a_run_on_virtual_samples_survives_a_kill(tmp_path):
    (tmp_path / "virtual.py").write_text(VIRTUAL)
    (tmp_path / "c.yaml").write_text(CONFIG)
    whole = lockstep(tmp_path, "train", "c.yaml", "run.name=whole", "launch.processes=1")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    killed = ["train", "c.yaml", "run.name=killed", "data.options.pause=0.05"]
    process = started(tmp_path, *killed, "launch.processes=2")
    wait_for_steps(tmp_path / "runs/killed", 10)
    workers(process)[1].kill()
    process.communicate(timeout=60)
    assert process.returncode != 0
    again = lockstep(tmp_path, *killed, "launch.processes=1")
    assert "resumed after step" in again.stdout, again.stdout + again.stderr
    expected, found = summary(tmp_path, "whole"), summary(tmp_path, "killed")
    assert found["steps"] == expected["steps"] == 60
    assert found["digest"] == expected["digest"]


def test_samples_of_a_large_epoch_are_spread_evenly():
    """Chi-square of the first samples of some epochs over 100 equal parts of 10^8."""
    draws = [permuted(np.arange(10_000), seed=1, epoch=epoch, samples=10**8) for epoch in range(20)]
    counts = np.stack([np.bincount(each // 10**6, minlength=100) for each in draws])
    chi_square = ((counts - 100.0) ** 2 / 100.0).sum(axis=1)
    assert abs(chi_square.mean() - 99) < 5 * np.sqrt(2 * 99 / 20)


def test_an_evaluation_by_length_takes_each_sample_once():
    lengths = np.arange(10, 0, -1)
    parts = [
        EvaluationRequests(samples=10, lengths=lengths, micro_batch=3, rank=rank, world_size=2) for rank in range(2)
    ]
    found = [(each.shard, each.indices, each.ghost) for requests in parts for each in requests]
    assert sorted(found) == [
        (0, (9, 8, 7), False),
        (1, (6, 5, 4), False),
        (2, (3, 2, 1), False),
        (3, (0,), False),
    ]
    assert all(type(index) is int for _, indices, _ in found for index in indices)
