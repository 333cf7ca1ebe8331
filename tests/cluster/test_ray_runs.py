"""Runs on a real Ray cluster: on one machine and on three, robbed of one, stopped and resumed, with the same bits."""

import json
import re
import subprocess
import sys

import pytest
from cluster import PATIENCE_SECONDS, until
from ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(4 * PATIENCE_SECONDS)]
LOCKSTEP = [sys.executable, "-m", "lockstep"]
SETTINGS = [
    "train.steps=120",
    "train.global_batch=32",
    "train.micro_batch=4",
    "data.limit=400",
    "evaluate.every_epochs=null",
    "checkpoint.every_steps=20",
    "checkpoint.keep=20",
    "data.augment=held.py",
]
HELD = """
import pathlib
import time

import paused

HERE = pathlib.Path({folder!r})


def augment(sample):
    for step in (20, 60):
        while paused.is_at(HERE, step):
            time.sleep(0.05)
    for name, seconds in (("slow", 0.02), ("slower", 0.1)):
        if (HERE / name).exists():
            time.sleep(seconds)
    return sample
"""
PAUSED = """
def is_at(folder, step):
    saved = (folder / "runs" / "a" / "checkpoints").glob("step-?????????")
    return (folder / f"hold-{step}").exists() and any(int(each.name[5:]) >= step for each in saved)
"""
"""A run waits at what it has saved while a file says so; the code is of two files, which travel with the job."""
WITHOUT = """
import runpy
import sys


class NoLockstep:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "lockstep":
            raise ModuleNotFoundError("No module named 'lockstep'")


sys.meta_path.insert(0, NoLockstep())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Program that runs another as in a Python without Lockstep."""


@pytest.fixture(scope="module")
def standing_ray(tmp_path_factory):
    if reason := RayCluster.why_not():
        pytest.skip(reason)
    pytest.importorskip("ray", reason="a Ray cluster needs the package ray")
    with RayCluster(tmp_path_factory.mktemp("ray"), nodes=3, cpus=2) as cluster:
        yield cluster


@pytest.fixture
def ray(standing_ray):
    yield standing_ray
    standing_ray.calm()


def write(folder, *held):
    (folder / "c.yaml").write_text("data: {kind: digits}\n")
    (folder / "held.py").write_text(HELD.format(folder=str(folder)))
    (folder / "paused.py").write_text(PAUSED)
    for step in held:
        (folder / f"hold-{step}").touch()


class Run:
    """A run that was submitted on the head, as on a login node."""

    def __init__(self, ray, folder, *settings, held=()):
        self.ray, self.folder, self.top = ray, folder / "runs" / "a", folder
        write(folder, *held)
        self.settings = settings

    def lockstep(self, *words):
        return self.ray.run("head", "env", "-C", self.top, *LOCKSTEP, *words, stderr=subprocess.STDOUT)

    def train(self, *words):
        launch = ["launch.kind=ray", f"launch.address={self.ray.url}", f"launch.python={sys.executable}"]
        launch += ["launch.processes=1", "launch.failure_timeout_seconds=10", "run.name=a"]
        return self.lockstep("train", "c.yaml", *SETTINGS, *launch, *self.settings, *words)

    def submit(self):
        done = self.train()
        assert done.returncode == 0, done.stdout
        return done.stdout

    @property
    def job(self):
        return json.loads((self.folder / "job.json").read_text())["job"]

    @property
    def said(self):
        return "\n".join(file.read_text() for file in (self.folder / "logs").glob("ray-*.out"))

    def until(self, condition, hope):
        try:
            until(condition, hope)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{self.said}\n{self.ray.jobs()}")

    def says(self, text):
        self.until(lambda: text in self.said, f"the words {text!r}")

    def is_held(self, step):
        """Wait until it has saved that step, or a later one, at which it waits."""
        checkpoints = self.folder / "checkpoints"
        saved = lambda: any(int(each.name[5:]) >= step for each in checkpoints.glob("step-?????????"))  # noqa: E731
        self.until(saved, f"step {step}")

    def host_of(self, node):
        """The host of a node of the run, which Ray chose."""
        return re.search(rf"node {node} \((\w+)\) has joined", self.said)[1]

    def goes_on(self, step):
        (self.top / f"hold-{step}").unlink()

    def ended(self):
        """Wait for the end of the job -> Ray's word for it."""
        self.until(lambda: self.ray.jobs()[self.job]["status"] not in ("PENDING", "RUNNING"), "the end of the job")
        return self.ray.jobs()[self.job]["status"]

    def finished(self):
        assert self.ended() == "SUCCEEDED", self.said
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The digest of the same settings on a lone process of this machine."""
    folder = tmp_path_factory.mktemp("plain")
    write(folder)
    command = [sys.executable, "-m", "lockstep.run.worker", "c.yaml", *SETTINGS, "run.name=a"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    return json.loads((folder / "runs" / "a" / "summary.json").read_text())["digest"]


def test_one_machine_that_is_followed(ray, tmp_path, plain):
    """The command shows the run to its end. The code comes from Ray, not from where it was, and is kept with the run."""
    run = Run(ray, tmp_path, "launch.nodes=1")
    done = run.train("--follow")
    assert done.returncode == 0, done.stdout
    assert "with its config and held.py, paused.py (" in done.stdout and "step 120/120" in done.stdout
    summary = run.finished()
    assert (summary["digest"], summary["world_size"]) == (plain, 1)
    assert str(run.folder / "ray" / "code" / "0" / "held.py") in (run.folder / "recipe.yaml").read_text()
    assert "step 120/120" in ray.ask(f"/api/jobs/{run.job}/logs")["logs"]
    status = run.lockstep("status", "runs/a").stdout
    assert f"Ray job {run.job} at {ray.url}: succeeded" in status and plain[:16] in status
    assert "step 120/120" in run.lockstep("logs", "runs/a").stdout


def test_three_machines_of_which_one_is_lost(ray, tmp_path, plain):
    """launch.recovery=live: the others go on; when Ray has the machine again, a launcher there joins."""
    run = Run(ray, tmp_path, "launch.nodes=3", "launch.recovery=live", held=(20, 60))
    run.submit()
    run.is_held(20)
    assert "3 " in run.said
    ray.kill("node2")
    run.goes_on(20)
    run.is_held(60)
    ray.heal("node2")
    run.says("has joined: its processes start beside the others")
    (tmp_path / "slow").touch()
    run.goes_on(60)
    history = run.folder / "history.jsonl"
    run.until(lambda: "1 process joined" in history.read_text(), "its processes")
    (tmp_path / "slow").unlink()
    summary = run.finished()
    assert summary["digest"] == plain
    sizes = [change["world_size"] for change in summary["regrouped"]]
    assert sizes[0] == 2 and sizes[-1] == 3, sizes
    assert "another one takes its place once Ray has it" in run.said and "starts again" not in run.said


@pytest.mark.matrix
def test_a_job_that_is_stopped_saves_and_is_resumed(ray, tmp_path, plain):
    """Ray's SIGTERM reaches the processes of both machines."""
    run = Run(ray, tmp_path, "launch.nodes=2", held=(20,))
    run.submit()
    run.is_held(20)
    (tmp_path / "slow").touch()
    run.goes_on(20)
    assert "to save and stop" in run.lockstep("cancel", "runs/a").stdout
    assert run.ended() == "STOPPED"
    assert "stopped by a signal after step" in run.said
    assert "has ended already" in run.lockstep("cancel", "runs/a").stdout
    (tmp_path / "slow").unlink()
    run.submit()
    summary = run.finished()
    assert (summary["digest"], summary["world_size"]) == (plain, 2)
    assert "resumed after step" in run.said


@pytest.mark.matrix
def test_a_lost_machine_is_waited_for(ray, tmp_path, plain):
    """Without live recovery, and with no machine to spare: the run starts again when the machine is back."""
    run = Run(ray, tmp_path, "launch.nodes=3", held=(20,))
    run.submit()
    run.is_held(20)
    ray.kill("node3")
    run.goes_on(20)
    run.says("waiting for 3 machines with 1 CPU: the cluster has 2; an autoscaler may add more")
    ray.heal("node3")
    assert run.finished()["digest"] == plain


@pytest.mark.matrix
def test_fewer_machines_are_enough(ray, tmp_path, plain):
    """launch.nodes=2:3 without live recovery: of three machines one is lost, and the two others start again."""
    run = Run(ray, tmp_path, "launch.nodes=2:3", held=(20, 60))
    run.submit()
    run.is_held(20)
    ray.kill(run.host_of(2))
    run.goes_on(20)
    run.is_held(60)
    run.says("another one takes its place once Ray has it")
    run.goes_on(60)
    summary = run.finished()
    assert (summary["digest"], summary["world_size"]) == (plain, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_a_machine_that_is_preempted(ray, tmp_path, plain, recovery):
    """A machine that is to go ends its Ray processes in order: the run saves, and starts again when Ray has machines."""
    run = Run(ray, tmp_path, "launch.nodes=3", f"launch.recovery={recovery}", held=(20,))
    run.submit()
    run.is_held(20)
    (tmp_path / "slow").touch()
    run.goes_on(20)
    ray.preempt(host := run.host_of(2))
    run.says("starts again from its newest checkpoint")
    assert "stopped by a signal after step" in run.said
    ray.heal(host)
    (tmp_path / "slow").unlink()
    assert run.finished()["digest"] == plain


@pytest.mark.matrix
def test_trials_of_a_sweep_are_jobs(ray, tmp_path):
    run = Run(ray, tmp_path)
    words = ["launch.kind=ray", f"launch.address={ray.url}", f"launch.python={sys.executable}", "optim.lr=1e-2,1e-3"]
    done = run.lockstep("sweep", "c.yaml", *SETTINGS, *words)
    assert done.returncode == 0, done.stdout
    sweep = json.loads((tmp_path / "runs" / "c-sweep" / "sweep.json").read_text())
    assert [trial["state"] for trial in sweep["trials"]] == ["finished", "finished"]
    assert len([job for job in ray.jobs() if job.startswith("trial-00")]) == 2


@pytest.mark.matrix
def test_doctor_on_all_machines_of_a_job(ray, tmp_path):
    run = Run(ray, tmp_path)
    words = ["launch.kind=ray", f"launch.address={ray.url}", f"launch.python={sys.executable}", "launch.nodes=2"]
    done = run.lockstep("doctor", "c.yaml", *words, "launch.processes=1", "--json", "found.json")
    assert done.returncode == 0, done.stdout
    ranks = json.loads((tmp_path / "found.json").read_text())["ranks"]
    assert len({rank["host"] for rank in ranks}) == 2


@pytest.mark.matrix
def test_the_head_is_lost(ray, tmp_path, plain):
    """The launchers save when their machines leave the cluster; the next cluster resumes the run."""
    run = Run(ray, tmp_path, "launch.nodes=2", held=(20,))
    run.submit()
    run.is_held(20)
    (tmp_path / "slower").touch()
    run.goes_on(20)
    ray.lose_head()
    assert "stopped by a signal after step" in run.said
    ray.start_again()
    assert "is not known at" in run.lockstep("status", "runs/a").stdout
    (tmp_path / "slower").unlink()
    run.submit()
    assert run.finished()["digest"] == plain
    assert "resumed after step" in run.said


def test_what_a_cluster_cannot_run_is_said_in_one_sentence(ray, tmp_path):
    """Too few machines; a Python without Lockstep, on all or one of them; another version of Ray."""
    bare, partly, other = tmp_path / "bare", tmp_path / "partly", tmp_path / "other"
    bare.write_text(f"#!/bin/sh\nshift 3\nexec {sys.executable} -IS -m lockstep\n")
    (tmp_path / "without.py").write_text(WITHOUT)
    hidden = f'[ $(hostname) = node2 ] && exec {sys.executable} -P {tmp_path}/without.py "$@"'
    partly.write_text(f'#!/bin/sh\n{hidden}\nexec {sys.executable} "$@"\n')
    lie = "import ray, runpy; ray.__version__ = '1.2.3'; runpy.run_module('lockstep.launch.ray_driver', run_name='__main__')"
    other.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} -P -c "{lie}" "$@"\n')
    cases = {
        ("launch.nodes=4", "launch.join_timeout_seconds=5"): "the Ray cluster has 3 of 4 machines with 1 CPU, and got",
        (f"launch.python={bare}",): "a machine of the cluster has no package lockstep: install Lockstep",
        ("launch.nodes=3", f"launch.python={partly}"): "a machine of the cluster has no package lockstep",
        (f"launch.python={other}",): "Version mismatch",
    }
    for program in (bare, partly, other):
        program.chmod(0o755)
    runs = []
    for number, (settings, text) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        runs.append((Run(ray, tmp_path / str(number), *settings), text))
        runs[-1][0].submit()
    for run, text in runs:
        assert run.ended() == "FAILED"
        status = run.lockstep("status", "runs/a").stdout.splitlines()[0]
        assert text in status and "Traceback" not in status, ray.jobs()[run.job]["message"]
