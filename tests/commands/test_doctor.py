"""`lockstep doctor`: planted faults are each named with their code, and a healthy set-up raises no alarm."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from contextlib import nullcontext

import psutil
import pytest
from places import ROOT
from running import lockstep
from warmed import warm_launchers

from lockstep.base import trust
from lockstep.core.host import matmul_speed
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust
from lockstep.tools.doctor.checks import (
    batches,
    built_model,
    cores,
    folder_of_runs,
    gpu_health,
    limits,
    network,
    newest_checkpoint,
    processes,
    samples,
    training_steps,
)
from lockstep.tools.doctor.doctor_context import DoctorContext, NotExamined, RankFacts

CONFIG = """
data: {kind: digits}
model: {kind: cnn}
train: {steps: 20, global_batch: 206, micro_batch: 103}
launch: {processes: 2}
run: {name: a}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def context_of(folder, *settings):
    file = folder / "c.yaml"
    recipe = recipes.load(file, list(settings))
    trust.own(recipe_trust.code_of_files(recipe))
    return DoctorContext(recipe=recipe, config=file)


def codes(findings):
    return [finding.code for finding in findings]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ([], []),
        (["launch.processes=4"], ["LS-CFG-01"]),
        (["launch.nodes=2"], ["LS-CFG-01"]),
        (["train.global_batch=309"], ["LS-CFG-02"]),
        (["train.global_batch=720", "train.micro_batch=360"], ["LS-CFG-03"]),
    ],
)
def test_batches(folder, settings, found):
    assert codes(batches.check(context_of(folder, *settings))) == found


BROKEN = """
import numpy as np

from lockstep.data.in_memory import Images


class Source(Images):
    def __getitems__(self, indices):
        if max(indices) >= 60:
            raise KeyError("sample is broken")
        return super().__getitems__(indices)


def source(options, split):
    return Source(np.zeros((100, 1, 8, 8), np.uint8), np.zeros(100, int), ["a", "b"])
"""


def test_samples(folder):
    (folder / "mine.py").write_text(BROKEN)
    mine = ["data.kind=user", "data.file=mine.py"]
    assert codes(samples.check(context_of(folder))) == []
    assert codes(samples.check(context_of(folder, "data.kind=user", "data.file=nowhere.py"))) == ["LS-DATA-01"]
    found = list(samples.check(context_of(folder, *mine)))
    assert [(each.code, each.severity) for each in found] == [("LS-DATA-02", "error")] * 2
    assert "KeyError: 'sample is broken'" in found[0].cause
    skipping = samples.check(context_of(folder, *mine, "data.on_bad_sample=skip"))
    assert {each.severity for each in skipping} == {"note"}
    assert codes(samples.check(context_of(folder, "data.workers=40"))) == ["LS-DATA-03"]
    assert codes(samples.check(context_of(folder, "launch.processes=64"))) == []  # it has no loader processes


def test_a_model_and_data_that_cannot_be_had(folder):
    """What rests on them is not examined, and no second finding says the same."""
    (folder / "model.py").write_text("def build(options, spec):\n    raise ZeroDivisionError('no layers')\n")
    context = context_of(folder, "model.kind=user", "model.file=model.py")
    (found,) = built_model.check(context)
    assert found.code == "LS-MODEL-01" and "ZeroDivisionError: no layers" in found.cause
    for check in (folder_of_runs.check, training_steps.check):
        with pytest.raises(NotExamined):
            list(check(context))
    (folder / "texts.csv").write_text("text,label\ngood,a\nbad,b\n")
    texts = ["data={kind: files, train: texts.csv, test: texts.csv}", "model={kind: transformer, name: /nowhere}"]
    context = context_of(folder, *texts)
    assert codes(samples.check(context)) + codes(built_model.check(context)) == ["LS-MODEL-01"]
    context = context_of(folder, "data.kind=user", "data.file=nowhere.py")
    assert codes(built_model.check(context)) == []


def test_a_much_faster_precision_is_named(folder, monkeypatch):
    """Of a large model, by the speeds that are measured here; no processor trains in tf32."""
    gpt = ["data={kind: text, tokenizer: bytes}", "model={kind: gpt, width: 256, layers: 1}", "train.precision=bf16"]
    monkeypatch.setitem(matmul_speed.FASTER, "bf16", ("fp32", 0.0))
    (found,) = built_model.check(context_of(folder, *gpt))
    assert (found.code, found.severity) == ("LS-MODEL-02", "note")
    assert "products in fp32 are" in found.cause and found.repair.startswith("train.precision=fp32")
    for settings in (["train.precision=bf16"], [*gpt[:2], "train.precision=tf32"]):
        assert codes(built_model.check(context_of(folder, *settings))) == []
    monkeypatch.setitem(matmul_speed.FASTER, "bf16", ("fp32", float("inf")))
    assert codes(built_model.check(context_of(folder, *gpt))) == []


def test_the_folder_of_runs(folder):
    check = folder_of_runs.check
    assert codes(check(context_of(folder))) == []
    (folder / "file").touch()
    assert codes(check(context_of(folder, "run.dir=file/runs"))) == ["LS-RUN-01"]
    assert codes(check(context_of(folder, "run.dir=/proc"))) == ["LS-RUN-01"]
    assert codes(check(context_of(folder, "checkpoint.keep=1000000000"))) == ["LS-RUN-04"]
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "checkpoints").touch()
    assert codes(check(context_of(folder))) == ["LS-RUN-05"]
    assert list((folder / "runs").iterdir()) == [folder / "runs" / "a"]


def test_a_limit_on_the_size_of_files(folder):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert codes(folder_of_runs.check(context_of(folder)))[0] == "LS-RUN-02"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_syncs_slowly(folder, monkeypatch):
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(1.1 * folder_of_runs.SLOW_SECONDS) or sync(file))
    (found,) = folder_of_runs.check(context_of(folder))
    assert (found.code, found.severity) == ("LS-RUN-03", "warning") and str(folder) in found.cause


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a small disk needs root and unshare")
def test_a_disk_that_is_full(folder):
    """A real file system of 1 MiB, which is full, and /dev/shm of 8 MiB, in a mount namespace of the command's own."""
    script = """
mkdir small; mount -t tmpfs -o size=1m none small; mount -t tmpfs -o size=8m none /dev/shm
head -c 900k /dev/zero > small/rest
exec "$@"
"""
    words = [sys.executable, "-m", "lockstep", "doctor", "c.yaml", "run.dir=small/runs", "--quick"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *words], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "LS-RUN-02 error" in done.stdout and "No space left on device" in done.stdout
    assert "LS-RUN-04 error" in done.stdout
    assert "LS-SYS-01 warning" in done.stdout


def test_the_newest_checkpoint(folder):
    same = ["train.global_batch=32", "train.micro_batch=16"]
    done = lockstep(folder, "train", "c.yaml", *same)
    assert done.returncode == 0, done.stderr
    check, run = newest_checkpoint.check, folder / "runs" / "a"
    assert codes(check(context_of(folder, *same))) == []
    assert codes(check(context_of(folder))) == ["LS-CKPT-02"]
    with (run / "history.jsonl").open("a") as file:
        line = {"time": 1.0, "kind": "saved", "step": 1, "seconds": 100.0, "stall_seconds": 0.1}
        file.write(json.dumps(line) + "\n")
    assert codes(check(context_of(folder, *same))) == ["LS-CKPT-03"]
    part = next((run / "checkpoints").glob("step-*/__0_0.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    (found, _) = check(context_of(folder, *same))
    assert (found.code, found.severity) == ("LS-CKPT-01", "error")


def test_cores_and_limits(folder, tmp_path):
    stat = tmp_path / "cpu.stat"
    stat.write_text("usage_usec 12\nnr_throttled 3\nthrottled_usec 5000000\n")
    for number, severity in ((psutil.cpu_count() + 1, "warning"), (100 * psutil.cpu_count(), "error")):  # as train does
        many = next(cores.check(context_of(folder, f"launch.processes={number}")))
        assert (many.code, many.severity) == ("LS-CPU-01", severity)
    assert "LS-CPU-02" in codes(cores.check(context_of(folder, "launch.processes=1"), cgroup=stat))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
    try:
        assert "LS-SYS-02" in codes(limits.check(context_of(folder)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "LS-SYS-03" in codes(limits.check(context_of(folder, "launch.processes=4096")))


def test_a_busy_machine(folder):
    """Real processes on every core."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(psutil.cpu_count())]
    try:
        assert "LS-CPU-03" in codes(cores.check(context_of(folder)))
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_the_network(folder, monkeypatch):
    assert codes(network.check(context_of(folder))) == []
    assert codes(network.check(context_of(folder, "launch.interface=eth77"))) == ["LS-NET-02"]
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert codes(network.check(context_of(folder))) == ["LS-NET-01"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="namespaces need root and unshare")
def test_a_loopback_that_is_down(folder):
    """A real network without it, and a machine's name that nothing resolves."""
    words = [sys.executable, "-m", "lockstep", "doctor", "c.yaml", "--quick"]
    script = 'hostname nowhere.invalid; exec "$@"'
    done = subprocess.run(
        ["unshare", "--net", "--uts", "sh", "-c", script, "sh", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "LS-NET-03 error" in done.stdout and "LS-NET-01 warning" in done.stdout


def test_gpus(folder):
    """The fields as the driver prints them, of a healthy GPU and of others; settings that slow NCCL down."""
    context = context_of(folder, "launch.environment={NCCL_P2P_DISABLE: '1', CUDA_LAUNCH_BLOCKING: '1'}")
    assert codes(gpu_health.check(context)) == ["LS-GPU-02"] * 2
    assert [codes(gpu_health.shared_out(3, gpus)) for gpus in (0, 2, 3)] == [[], ["LS-GPU-01"], []]
    healthy = {"errors": "0", "thermal": "Not Active", "power": "Not Active", "used": "4", "total": "143771"}
    assert codes(gpu_health.health(0, healthy)) == []
    assert codes(gpu_health.health(0, healthy | {"errors": "[N/A]", "used": "[N/A]"})) == []
    assert codes(gpu_health.health(0, healthy | {"errors": "3"})) == ["LS-GPU-03"]
    assert codes(gpu_health.health(0, healthy | {"thermal": "Active"})) == ["LS-GPU-04"]
    assert codes(gpu_health.health(0, healthy | {"used": "100000"})) == ["LS-GPU-05"]


MODEL = """
import os

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, batch):
        FORWARD
        return self.layer(batch["image"].float().flatten(1) / 16 * (1 + int(os.environ["WORLD_SIZE"])))


def build(options, spec):
    return Net()
"""


@pytest.mark.parametrize(
    ("line", "settings", "found", "text"),
    [
        ("pass", [], ["LS-STEP-02"], "on 1 and on 2 processes are not the same bits"),
        ("raise KeyError('no such layer')", [], ["LS-STEP-01"], "KeyError: 'no such layer'"),
    ],
    ids=["depends on the number of processes", "fails"],
)
def test_training_steps(folder, line, settings, found, text):
    (folder / "model.py").write_text(MODEL.replace("FORWARD", line))
    context = context_of(folder, "model.kind=user", "model.file=model.py", *settings)
    with nullcontext() if "raise" in line else warm_launchers():  # one of them as new interpreters
        seen = list(training_steps.check(context))
    assert codes(seen) == found
    assert text in seen[0].cause + seen[0].repair
    assert [path for path in folder.iterdir() if path.name.startswith(".lockstep")] == []


def facts(rank, *, flops=1e11, processor="one", **speeds):
    return RankFacts(
        rank=rank,
        host="host",
        processor=processor,
        flops=flops,
        seconds={"barrier": 1e-4},
        links={int(other[1:]): [1e-4, speed] for other, speed in speeds.items()},
    )


@pytest.mark.parametrize(
    ("measured", "found"),
    [
        ([facts(0, _1=1e9), facts(1, _0=9e8)], []),
        ([facts(0), facts(1), facts(2, flops=5e10)], ["LS-RANK-03"]),
        ([facts(0), facts(1, processor="another")], ["LS-RANK-02"]),
        ([facts(0, _1=1e9, _2=1e8), facts(1, _0=1e9, _2=1e9), facts(2, _0=1e9, _1=1e9)], ["LS-NET-04"]),
    ],
    ids=["healthy", "slow processor", "other processor", "slow in one direction"],
)
def test_what_the_ranks_measure_is_judged(measured, found):
    assert codes(processes.judged(measured)) == found


HEALTHY = {
    "fsdp": ["parallel.kind=fsdp"],
    "pipeline": ["parallel.kind=pipeline"],
    "bf16, one process": ["train.precision=bf16", "launch.processes=1"],
    "loaders, augmented": ["data.workers=1", "data.augment=augment.py"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("setup", HEALTHY)
def test_other_healthy_set_ups(folder, setup):
    (folder / "augment.py").write_text("def augment(sample):\n    return sample\n")
    done = lockstep(folder, "doctor", "c.yaml", *HEALTHY[setup], "--json", "d.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(codes_of(json.loads((folder / "d.json").read_text()))) <= BUSY, done.stdout


def test_healthy(folder):
    """No finding, and what was measured is shown and in the file."""
    done = lockstep(folder, "doctor", "c.yaml", "--json", "d.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "collectives of 4 MiB: " in done.stdout and "MB/s" in done.stdout
    document = json.loads((folder / "d.json").read_text())
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert set(codes_of(document)) <= BUSY
    done = lockstep(folder, "doctor", "--quick", "--json", "d.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(codes_of(json.loads((folder / "d.json").read_text()))) <= BUSY


BUSY = {"LS-CPU-03", "LS-RANK-03", "LS-RUN-03"}
"""Of a machine on which other tests run."""


def codes_of(document):
    return [finding["code"] for finding in document["findings"]]


def test_several_machines_need_their_names(folder):
    """Without them, this machine is examined and the reader told; a wrong address is a message."""
    done = lockstep(folder, "doctor", "c.yaml", "launch.nodes=2", "--quick")
    assert "only this machine was examined" in done.stdout
    done = lockstep(folder, "doctor", "c.yaml", "--rendezvous", "nonsense")
    assert done.returncode == 2 and "should be HOST:PORT" in done.stderr
    done = lockstep(folder, "doctor", "c.yaml", "--json", "nowhere/d.json")
    assert done.returncode == 2 and "there is no folder nowhere" in done.stderr


def test_every_code_is_in_the_documentation_and_of_one_check():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    checks, all_files = ((ROOT / "src" / "lockstep").rglob(name) for name in ("checks/*.py", "*.py"))
    codes = [{*re.findall(r'"(LS-[A-Z]+-[0-9]+)"', file.read_text())} for file in checks]
    assert sum(map(len, codes)) == len(set().union(*codes)) > 20
    every = sorted({code for file in all_files for code in re.findall(r'"(LS-[A-Z]+-[0-9]+)"', file.read_text())})
    assert [code for code in every if f"| {code} |" not in text] == []
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_doctor*.py"))
    assert [code for code in every if f'"{code}' not in tests and f"({code})" not in tests] == []
