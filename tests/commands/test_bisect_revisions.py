"""`lockstep bisect CONFIG --revisions OLD NEW`: each revision is trained with its own code, in a worktree of its own."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from running import lockstep, started

MODEL = """
from layers import Norm
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(64, 16), Norm(), nn.Linear(16, 10)

    def forward(self, batch):
        return self.head(self.norm(self.first(batch["image"].flatten(1) / 255)))


def build(options, spec):
    return Net()
"""
LAYERS = """
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        return x / (x.var(1, keepdim=True) + 1e-5).sqrt()
"""
CONFIG = """
data: {kind: user, file: rows.py}
model: {kind: user, file: model.py}
train: {steps: 12, global_batch: 16, micro_batch: 8}
optim: {lr: 0.01}
"""
ROWS = """
from pathlib import Path

from lockstep.data.sources import _digits as digits


def source(options, split):
    assert Path(__file__).with_name("rows.csv").exists()  # which git does not track
    return digits.build(digits.Config(kind="digits", limit=64), split)
"""


def git(folder, *arguments):
    who = ["-c", "user.name=N", "-c", "user.email=n@example.org"]
    return subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def committed(folder, **files):
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "-qm", "change")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "project").mkdir()
    folder = tmp_path / "project"
    git(folder, "init", "-q", ".")
    (folder / "rows.csv").write_text("1")
    committed(folder, _gitignore="rows.csv\nruns\n__pycache__\n", README_md="nothing")
    committed(folder, c_yaml=CONFIG, model_py=MODEL, layers_py=LAYERS, rows_py=ROWS)
    return folder


def bisected(folder, *arguments, code):
    done = lockstep(folder, "bisect", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert git(folder, "worktree", "list").count("\n") == 1, "a worktree is left behind"
    assert not git(folder, "status", "--porcelain")
    return done.stdout + done.stderr


def test_a_changed_epsilon_is_named(folder):
    committed(folder, README_md="something")
    committed(folder, layers_py=LAYERS.replace("1e-5", "1e-6"))
    committed(folder, layers_py=LAYERS.replace("1e-5", "1e-7"))  # what is checked out is neither of them
    same = bisected(folder, "c.yaml", "--revisions", "HEAD~3", "HEAD~2", "--steps", "5", code=0)
    assert "same bits: the chains are equal up to step 5" in same
    other = bisected(folder, "c.yaml", "--revisions", "HEAD~2", "HEAD~1", "--steps", "5", code=1)
    assert "differ at step 1" in other
    line = LAYERS.splitlines().index("class Norm(nn.Module):") + 1
    assert re.search(rf"step 1, shard 0: module network\.norm \(Norm, layers\.py:{line}\) gave other", other), other
    assert "not reproduced" not in other


def test_what_cannot_be_compared_is_said(folder, tmp_path):
    def said(*arguments, place=folder):
        return lockstep(place, "bisect", *arguments).stderr

    assert "there is no revision 'gone' in" in bisected(folder, "c.yaml", "--revisions", "HEAD", "gone", code=2)
    assert "c.yaml is not in revision HEAD~1" in bisected(folder, "c.yaml", "--revisions", "HEAD~1", "HEAD", code=2)
    assert "name two runs, or a config and --revisions OLD NEW" in said("c.yaml")
    assert "no.yaml is no config" in said("no.yaml", "--revisions", "HEAD~1", "HEAD")
    (tmp_path / "c.yaml").write_text(CONFIG)
    assert "c.yaml is in no git repository" in said("c.yaml", "--revisions", "A", "B", place=tmp_path)
    assert "change into" in said("project/c.yaml", "--revisions", "HEAD", "HEAD", place=tmp_path)
    committed(folder, model_py="def build(options, spec):\n    raise RuntimeError('not yet written')\n")
    assert "not yet written" in bisected(folder, "c.yaml", "--revisions", "HEAD~1", "HEAD", "--steps", "2", code=1)


def test_ctrl_c_removes_the_worktrees(folder):
    process = started(folder, "bisect", "c.yaml", "--revisions", "HEAD", "HEAD", "--steps", "12")
    while process.poll() is None:  # until the first revision is trained
        *_, tree = git(folder, "worktree", "list", "--porcelain").strip().split("\n\n")
        place = Path(tree.partition("\n")[0].removeprefix("worktree "))
        if place.with_name("run-A").joinpath("metrics.jsonl").exists():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert git(folder, "worktree", "list").count("\n") == 1
