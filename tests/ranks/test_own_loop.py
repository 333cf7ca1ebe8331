"""lockstep.Loop: a script's own loop has the bits of a run from a config, on any number of processes, after any kill."""

import difflib
import io
import json
import math
import os
import pathlib
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from functools import partial

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import warm
from own_loops import SIZES, Net, Points, halved, losses, made, trained
from places import ROOT, SUPPORT
from torch.optim import lr_scheduler

import lockstep
from lockstep.checkpoint import layout

EXAMPLE = ROOT / "examples" / "own_loop"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def milestones(optimizer):
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.MultiStepLR(optimizer, [2, 5])], [2])


KINDS = {
    "plain": {},
    "bf16 and clipping": {"precision": "bf16", "clip": 0.1},
    "fp16": {"precision": "fp16", "optimizer": partial(torch.optim.SGD, momentum=0.9, fused=True)},
    "a scheduler": {"scheduler": milestones, "optimizer": torch.optim.NAdam},
    "a schedule": {"schedule": halved, "optimizer": torch.optim.Adagrad},
    "too few micro-batches": {"micro_batch": 24},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_processes_changes_nothing(ranks, tmp_path, kind):
    """Nor does a break in the middle, and a start with another number of processes."""
    settings = KINDS[kind]
    ((digest, seen, figures),) = ranks(1, train_on_rank, tmp_path / "1", settings)
    assert [number for number, *_ in seen] == list(range(10))
    assert figures["samples"] == 45 and 0 <= figures["right"] <= 45 and figures["loss"] > 0
    for _, begun, _ in ranks(3, train_on_rank, tmp_path / "3", {**settings, "until": 7, "save_steps": 3}):
        assert begun == seen[:7]
    for found in ranks(2, train_on_rank, tmp_path / "3", settings):
        assert found == (digest, seen[6:], figures)


def train_on_rank(folder, settings):
    return trained(folder, **settings)


def test_a_rate_that_is_a_tensor_goes_on_where_it_was(ranks, tmp_path):
    """A scheduler changes it in place, with what the loop has noted of its beginning."""
    (whole,) = ranks(1, with_tensor_rate, tmp_path / "whole", None)
    assert ranks(1, with_tensor_rate, tmp_path / "parts", 4) == ["cut"]
    assert ranks(1, with_tensor_rate, tmp_path / "parts", None) == [whole]


def with_tensor_rate(folder, cut_after):
    lockstep.seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loop = lockstep.Loop(model, optimizer, Points(), folder=folder, scheduler=scheduler, save_steps=2, **SIZES)
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch))
        scheduler.step()
        if step.number == cut_after:
            return "cut"
    return loop.digest, float(optimizer.param_groups[0]["lr"])


def test_random_numbers_outside_of_micro_batches_are_those_of_the_step(ranks, tmp_path):
    """Drawn before a step, after it, and in an evaluation, which leaves no trace in them."""
    (alone,) = ranks(1, draws, tmp_path / "1")
    assert ranks(2, draws, tmp_path / "2") == [alone] * 2
    assert len(set(alone[1:])) == 5


def draws(folder):
    _, _, loop = made(folder, steps=2, epochs=None)
    drawn = []
    for step in loop:
        drawn.append(random.random())
        for batch in step:
            step.backward(losses(loop._model, batch) * np.random.rand())
        noise = loop.evaluate(Points(1, 45), lambda batch: {"noise": torch.rand(len(batch["x"]))})
        drawn.append(float(torch.rand(())))
    return loop.digest, *drawn, noise["noise"]


def test_processes_work_together(ranks, tmp_path):
    """Unseeded models become equal; sums and stops are agreed on; workers load the data; shut folders are opened again."""
    found = ranks(3, together, tmp_path)
    assert len({digest for digest, *_ in found}) == 1
    assert [figures for _, figures in found] == [(math.fsum([0.1] * 6), 3, 21, math.inf, 6, 0)] * 3


def together(folder):
    torch.manual_seed(dist.get_rank())
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    text = io.StringIO()
    with redirect_stderr(text):
        loop = lockstep.Loop(model, optimizer, Points(), folder=folder, workers=2, **SIZES)
    rank, counts = loop.rank, 0
    assert ("lockstep.seed(0)" in text.getvalue()) == loop.is_main
    for step in loop:
        for batch in step:
            step.backward(losses(model, batch), count=torch.tensor(len(batch["y"])))
        counts += step.count
        if step.number == 4:
            assert step.ends_epoch and step.count == 4
            loop.stop()
    assert (counts, loop.done) == (124, 6)
    sums = (
        loop.sum([0.1] * (rank + 1)),
        loop.sum(torch.tensor([rank, 0])),
        loop.sum(np.arange(rank, 7 if rank == 0 else 0)),
    )
    beyond = loop.sum(math.inf if rank == 1 else 0.5)
    again = lockstep.Loop(model, optimizer, Points(), folder=folder, **SIZES)
    return loop.digest, (*sums, beyond, again.done, len(list(again)))


def test_a_run_from_a_config_has_the_same_bits(ranks, tmp_path):
    """With BatchNorm, dropout, bf16, clipping, random numbers in the data, an unused head, and an optimizer and a
    schedule of the script's."""
    (tmp_path / "user.py").write_text(USER.format(tests=str(SUPPORT)))
    settings = ["data.kind=user", "data.file=user.py", "model.kind=user", "model.file=user.py", "run.seed=3"]
    settings += ["optim.kind=user", "optim.lr=0.05", "optim.clip=0.1", "schedule.shape=user"]
    settings += ["train.global_batch=24", "train.micro_batch=8", "train.epochs=2", "train.precision=bf16"]
    settings += ["parallel.find_unused=true", "launch.processes=2", "run.name=config", "evaluate.every_epochs=null"]
    (tmp_path / "c.yaml").write_text("run: {}\n")
    done = warm.run(["lockstep", "train", "c.yaml", *settings], cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    same = {"precision": "bf16", "clip": 0.1, "seed": 3, "optimizer": torch.optim.AdamW, "schedule": halved}
    digest, *_ = ranks(2, train_on_rank, tmp_path / "own", same)[0]
    assert (summary(tmp_path / "runs" / "config")["digest"], digest) == (digest, summary(tmp_path / "own")["digest"])
    assert summary(tmp_path / "runs" / "config")["chain"] == summary(tmp_path / "own")["chain"]


USER = """
import sys

sys.path.append({tests!r})

import torch
from own_loops import Net, Points
from own_loops import halved as schedule


class Network(Net):
    def forward(self, batch):
        return super().forward(batch["x"])


def build(options, spec):
    return Network()


def optimizer(module, options):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


class Named(Points):
    classes = ("no", "yes")

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {{"x": sample["x"], "label": sample["y"]}}


def source(options, split):
    return Named()
"""


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def script(folder, *command, **variables):
    """A file alone is run in a process forked from a warm one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [str(word) for word in command]
    opened = warm.Popen if len(words) == 1 else subprocess.Popen
    return opened(words, cwd=folder, env=environment, start_new_session=True, **pipes)


def ended(process, code=0):
    try:
        output = process.communicate(timeout=150)[0]
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


@pytest.fixture(scope="module")
def lone(tmp_path_factory):
    """The folder of the example, run on one process."""
    folder = tmp_path_factory.mktemp("lone")
    for file in EXAMPLE.iterdir():
        shutil.copy(file, folder)
    assert ended(script(folder, "after.py")).count("epoch ") == 5
    return folder


def test_the_example_has_the_bits_of_its_config(lone, tmp_path):
    """Also under torchrun."""
    two = script(tmp_path, *TORCHRUN, "--nproc-per-node=2", lone / "after.py")
    done = warm.run(["lockstep", "train", "same.yaml", "run.name=config", "launch.processes=2"], cwd=lone, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ended(two).count("epoch ") == 5
    found = [
        summary(folder) for folder in (lone / "runs" / "config", lone / "runs" / "mine", tmp_path / "runs" / "mine")
    ]
    assert [(each["digest"], each["chain"]) for each in found] == [(found[0]["digest"], found[0]["chain"])] * 3
    assert [each["world_size"] for each in found] == [2, 1, 2]


@pytest.mark.matrix
def test_the_example_in_processes_that_a_script_has_spawned(lone):
    (lone / "spawned.py").write_text(SPAWNED)
    assert ended(script(lone, sys.executable, "spawned.py")).count("epoch ") == 5
    mine, spawned = (summary(lone / "runs" / name) for name in ("mine", "three"))
    assert (spawned["digest"], spawned["chain"], spawned["world_size"]) == (mine["digest"], mine["chain"], 3)


SPAWNED = """
import tempfile

import torch.multiprocessing as mp


def work(rank, store):
    import after
    import torch.distributed as dist
    import lockstep

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    own = lockstep.Loop
    lockstep.Loop = lambda *args, **settings: own(*args, **{**settings, "folder": "runs/three"})
    after.main()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(tempfile.mkdtemp() + "/store",), nprocs=3)
"""


def test_a_killed_script_goes_on(ranks, tmp_path):
    """Two processes are killed in the middle of a step; then one is asked to stop; then three go on to the end."""
    whole, own = tmp_path / "whole", tmp_path / "own"
    for folder in (whole, own):
        folder.mkdir()
        (folder / "slow.py").write_text(SLOW)
    ranks(1, go_on, whole)
    killed = script(own, *TORCHRUN, "--nproc-per-node=2", "slow.py", PAUSE="20", SECONDS="100")
    wait_for(own / "20")
    os.killpg(killed.pid, signal.SIGSTOP)  # all at once
    for process in reversed([killed, *psutil.Process(killed.pid).children(recursive=True)]):
        process.kill()
    killed.communicate(timeout=100)
    stopped = script(own, "slow.py", PAUSE="40", SECONDS="1")
    wait_for(own / "40")
    stopped.send_signal(signal.SIGTERM)
    assert "stopped by a signal after step 4" in ended(stopped, code=75)
    newest = layout.listed(own / "runs" / "mine" / "checkpoints")[0]
    assert 41 <= layout.step_of(newest) <= 43 and not (own / "runs" / "mine" / "summary.json").exists()
    ranks(3, go_on, own)
    assert summary(own / "runs" / "mine")["digest"] == summary(whole / "runs" / "mine")["digest"]


def go_on(folder):
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        runpy.run_path("slow.py")
    finally:
        os.chdir(before)


SLOW = """
import os
import pathlib
import time

import torch
import torch.nn.functional as F

import lockstep

lockstep.seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
loop = lockstep.Loop(
    model, optimizer, data, folder="runs/mine", global_batch=8, micro_batch=2, steps=60, save_steps=7
)
for step in loop:
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y, reduction="sum"))
        if str(step.number) == os.environ.get("PAUSE"):
            pathlib.Path(str(step.number)).touch()
            time.sleep(float(os.environ["SECONDS"]))
"""


def test_commands_read_the_folder_of_a_loop(lone):
    """But for those that need its model, which say so."""
    found = {}
    for command in (["status"], ["checkpoints"], ["watch", "--once"], ["report"], ["compare", "runs/mine"], ["export"]):
        done = warm.run(["lockstep", *command, "runs/mine"], cwd=lone, timeout=60)
        found[command[0]] = done.returncode, done.stdout + done.stderr
    digest = summary(lone / "runs" / "mine")["digest"]
    assert {name for name, (code, _) in found.items() if code} == {"export"}
    assert f"finished after 145 steps · digest {digest[:16]}" in found["status"][1]
    assert "sizes right" in found["checkpoints"][1]
    assert "step 145/145" in found["watch"][1]
    assert "all 8 tensors of step 145 are equal" in found["compare"][1]
    assert "lockstep.Loop" in found["export"][1]


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)


def test_the_page_shows_the_files():
    page = (ROOT / "docs" / "your-own-loop.md").read_text()
    before, after = ((EXAMPLE / name).read_text() for name in ("before.py", "after.py"))
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), "before.py", "after.py", n=0)
    assert f"```python\n{before}```" in page and f"```diff\n{''.join(lines)}```" in page
