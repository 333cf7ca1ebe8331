"""Runs on a real Slurm cluster: pre-empted, cut off, robbed of machines, and still with the bits of a lone process."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from cluster import PATIENCE_SECONDS, until
from holding import HOLDING
from places import EXAMPLES

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(4 * PATIENCE_SECONDS)]
LOCKSTEP = [sys.executable, "-m", "lockstep"]
SETTINGS = [
    "train.steps=200",
    "train.global_batch=32",
    "train.micro_batch=4",
    "data.limit=400",
    "evaluate.every_epochs=null",
    "checkpoint.every_steps=50",
    "checkpoint.keep=20",
    "data.augment=held.py",
]
HELD = """
import time
from pathlib import Path

HERE = Path(__file__).parent
CHECKPOINTS = HERE / "runs" / "a" / "checkpoints"
WAITS = {CHECKPOINTS / "step-000000050": HERE / "go", CHECKPOINTS / "step-000000100": HERE / "go-100"}


def augment(sample):
    for saved, go in WAITS.items():
        while saved.exists() and not go.exists():
            time.sleep(0.05)
    if (HERE / "slow").exists():
        time.sleep(0.02)
    return sample
"""
"""A run waits once it has saved something, so that what is done to it comes in its midst on any machine; and once more
where it is asked to."""
SLOW = """
import time


def augment(sample):
    time.sleep(0.02)
    return sample
"""
"""A run that goes on for minutes leaves the machine to other tests."""
QUICK = "launch.failure_timeout_seconds=20"
URGENT = "#!/bin/bash\n#SBATCH --partition=urgent --nodes=2 --exclusive --time=1 --output=/dev/null\nsleep 1\n"
EXAMPLE = EXAMPLES / "slurm" / "train.slurm"


def lockstep(slurm, folder, *words):
    """The command line, as on a login node."""
    command = [*LOCKSTEP, *words]
    return subprocess.run(
        command, cwd=folder, env=slurm.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def write(folder, *, is_held):
    """What a run is started from."""
    (folder / "c.yaml").write_text("data: {kind: digits}\n")
    (folder / "held.py").write_text(HELD)
    (folder / "slow.py").write_text(SLOW)
    (folder / "go-100").touch()
    if not is_held:
        (folder / "go").touch()


class Run:
    """A run that was submitted."""

    def __init__(self, slurm, folder, *settings, is_held=True):
        self.slurm, self.folder, self.top = slurm, folder / "runs" / "a", folder
        write(folder, is_held=is_held)
        words = ["launch.kind=slurm", "launch.partition=patient", "launch.processes=1", "launch.cpus=2"]
        words += ["launch.time=30", "run.name=a"]
        done = lockstep(slurm, folder, "train", "c.yaml", *SETTINGS, *words, *settings)
        assert done.returncode == 0, done.stderr
        self.job = re.search(r"submitted as Slurm job (\d+)", done.stdout)[1]

    @property
    def said(self):
        files = sorted((self.folder / "logs").glob("slurm-*.out"))
        return "\n".join(file.read_text() for file in files)

    @property
    def step(self):
        return max((int(p.name[5:]) for p in (self.folder / "checkpoints").glob("step-?????????")), default=0)

    def is_held(self):
        """Wait until it has saved its first checkpoint, and goes no further."""
        self.until(lambda: self.step >= 50, "step 50")

    def goes_on(self):
        (self.top / "go").touch()

    def until(self, condition, hope):
        try:
            until(condition, hope)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{self.said}\n{self.slurm.status()}")

    def says(self, text):
        self.until(lambda: text in self.said, f"the words {text!r}")

    def finished(self):
        """Wait for the end -> summary.json."""
        path = self.folder / "summary.json"
        self.until(lambda: path.exists() and '"finished"' in path.read_text(), "the end of the run")
        self.until(lambda: self.slurm.state(self.job) == "COMPLETED", "the end of the job")
        return json.loads(path.read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The digest of the same settings on a lone process of this machine."""
    folder = tmp_path_factory.mktemp("plain")
    write(folder, is_held=False)
    command = [sys.executable, "-m", "lockstep.run.worker", "c.yaml", *SETTINGS, "run.name=a"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    return json.loads((folder / "runs" / "a" / "summary.json").read_text())["digest"]


@pytest.mark.matrix
def test_trials_of_a_sweep_are_jobs(slurm, tmp_path):
    """Two at a time. When the command is killed, their jobs go on; the next one follows them, resumes a trial whose job
    has gone meanwhile, and submits the others. A job that is cancelled while it is followed fails alone."""
    write(tmp_path, is_held=False)
    (tmp_path / "holding.py").write_text(HOLDING)
    (tmp_path / "hold").write_text("trial-002 trial-003 trial-004")
    words = ["sweep", "c.yaml", *SETTINGS, "launch.kind=slurm", "launch.partition=patient", "launch.processes=1"]
    words += ["launch.time=30", "observe.file=holding.py", "optim.lr=1e-2,1e-3,1e-4,1e-5", "--jobs", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    trials = [tmp_path / "runs" / "c-sweep" / f"trial-00{number}" for number in (1, 2, 3, 4)]

    def started():
        return subprocess.Popen([*LOCKSTEP, *words], cwd=tmp_path, env=slurm.environment, **pipes)

    def job(trial):
        return json.loads((trial / "job.json").read_text())["job"]

    def cancel(trial):
        subprocess.run(["scancel", job(trial)], env=slurm.environment, check=True)
        until(lambda: slurm.state(job(trial)) not in ("PENDING", "RUNNING", "COMPLETING"), "the end of a cancelled job")

    command = started()
    until(lambda: (trials[2] / "metrics.jsonl").exists(), "the third trial, once the first has ended")
    command.kill()
    command.communicate(timeout=20)
    jobs = [job(trial) for trial in trials[:3]]
    cancel(trials[2])
    (tmp_path / "hold").write_text("trial-004")
    command = started()
    until(lambda: (trials[3] / "metrics.jsonl").exists(), "the fourth trial")
    cancel(trials[3])
    (tmp_path / "hold").unlink()
    output, _ = command.communicate(timeout=PATIENCE_SECONDS)
    assert command.returncode == 0, output
    sweep = json.loads((tmp_path / "runs" / "c-sweep" / "sweep.json").read_text())
    assert [trial["state"] for trial in sweep["trials"]] == ["finished", "finished", "finished", "failed"], output
    assert [job(trial) == before for trial, before in zip(trials[:3], jobs, strict=True)] == [True, True, False]
    values = {trial["number"]: trial["value"] for trial in sweep["trials"] if trial["state"] == "finished"}
    assert sweep["best"] == f"trial-00{min(values, key=values.get)}"


def test_pre_empted_and_finished(slurm, tmp_path, plain):
    """Two machines of two processes each; an urgent job takes their place, and the run comes back."""
    run = Run(slurm, tmp_path, "launch.nodes=2", "launch.processes=2")
    run.is_held()
    assert "running on node[1-2]" in lockstep(slurm, tmp_path, "status", "runs/a").stdout
    (tmp_path / "urgent.sh").write_text(URGENT)
    urgent = slurm.submit(str(tmp_path / "urgent.sh"))
    run.says("received a warning: the run saves a checkpoint and stops")
    run.goes_on()
    run.says("is requeued")
    stopped = int(re.search(r"stopped by a signal after step (\d+)", run.said)[1])
    assert slurm.wait_for(urgent, ("COMPLETED",))
    summary = run.finished()
    assert summary["digest"] == plain
    assert summary["world_size"] == 4
    assert f"resumed after step {stopped}" in run.said
    shown = lockstep(slurm, tmp_path, "logs", "runs/a").stdout
    assert "received a warning: the run saves a checkpoint and stops" in shown
    assert summary["digest"][:16] in lockstep(slurm, tmp_path, "status", "runs/a").stdout


@pytest.mark.matrix
def test_a_lost_machine_is_done_without(slurm, tmp_path, plain):
    """launch.nodes=1:2: the other one goes on."""
    run = Run(slurm, tmp_path, "launch.nodes=1:2", 'launch.options=["--nodes=2"]', QUICK)
    run.is_held()
    slurm.kill("node2")
    run.says("Starting again on 1 process of 1 machine from step-")
    run.goes_on()
    summary = run.finished()
    assert (summary["digest"], summary["world_size"]) == (plain, 1)
    assert "node 1 (node2) has sent no heartbeat" in run.said


def test_the_others_go_on_without_a_restart_where_a_machine_is_lost(slurm, tmp_path, plain):
    """launch.recovery=live, with any launch.nodes. When Slurm has the machine again, it joins the run, by a job whose end
    is not the run's."""
    run = Run(slurm, tmp_path, "launch.nodes=2", "launch.recovery=live", "launch.cpus=4")  # all of a machine
    (tmp_path / "go-100").unlink()
    run.is_held()
    slurm.kill("node2")
    run.goes_on()
    run.until(lambda: run.step >= 100, "step 100")
    run.says("takes its place once it starts")
    slurm.wait_for_node("node2", "down*")
    slurm.heal("node2")
    run.says("has joined: its processes start beside the others")
    (tmp_path / "slow").touch()
    (tmp_path / "go-100").touch()
    history = run.folder / "history.jsonl"
    run.until(lambda: "1 process joined" in history.read_text(), "its processes")
    subprocess.run(["scancel", f"--name=join-{run.job}"], env=slurm.environment, check=True)
    run.until(lambda: history.read_text().count("1 process now") >= 2, "the loss of its processes")
    (tmp_path / "slow").unlink()
    summary = run.finished()
    assert summary["digest"] == plain
    assert [change["world_size"] for change in summary["regrouped"]][:3] == [1, 2, 1]
    assert "leaves the run (SIGTERM)" in run.said
    assert "node 1 (node2) is lost, with rank 1" in run.said and "Starting again" not in run.said


@pytest.mark.matrix
def test_too_few_machines_go_back_to_the_queue(slurm, tmp_path, plain):
    """launch.nodes=2: one is lost, the job waits for its return."""
    run = Run(slurm, tmp_path, "launch.nodes=2", QUICK)
    run.is_held()
    slurm.kill("node2")
    run.until(lambda: slurm.state(run.job) == "PENDING", "the queue")
    slurm.wait_for_node("node2", "down*")
    slurm.heal("node2")
    run.goes_on()
    assert run.finished()["digest"] == plain


@pytest.mark.matrix
def test_a_machine_that_is_cut_off(slurm, tmp_path, plain):
    """Nobody sees a closed connection: silence is noticed on both sides, and both end what cannot go on."""
    run = Run(slurm, tmp_path, "launch.nodes=1:2", 'launch.options=["--nodes=2"]', QUICK)
    run.is_held()
    slurm.cut("node2")
    run.says("Starting again on 1 process of 1 machine from step-")
    alone = lambda: not slurm.run("node2", "pgrep", "lockstep-r").stdout  # noqa: E731
    run.until(alone, "the end of the processes that were cut off")
    slurm.heal("node2")
    run.goes_on()
    assert run.finished()["digest"] == plain


def test_a_time_limit_is_only_the_end_of_a_start(slurm, tmp_path):
    """Slurm warns as long before as it is asked to, and up to a minute earlier; the next start has a limit of its own."""
    words = ["launch.nodes=1", "launch.time=2", "launch.warning_seconds=80", "train.steps=1000000"]
    words += ["data.augment=slow.py"]
    run = Run(slurm, tmp_path, *words, is_held=False)
    run.says("is requeued")
    stopped = re.search(r"stopped by a signal after step (\d+)", run.said)
    word = f"resumed after step {stopped[1]}" if stopped else "run a:"  # warned before there was anything to save
    run.until(lambda: word in run.said.partition("is requeued")[2], "the next start")


@pytest.mark.matrix
def test_doctor_on_all_machines_of_a_job(slurm, tmp_path):
    """One command on the login node: srun starts it on both, and the pairs between them are measured. What is wrong on
    one of them is reported with its name, and a machine that is cut off is missed."""
    write(tmp_path, is_held=False)
    words = ["launch.kind=slurm", "launch.nodes=2", "launch.processes=1", "launch.cpus=2", "--json", "found.json"]
    done = lockstep(slurm, tmp_path, "doctor", "c.yaml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "found.json").read_text())
    assert [rank["host"] for rank in document["ranks"]] == ["node1", "node2"]
    assert {finding["code"] for finding in document["findings"]} <= {"LS-CPU-03", "LS-RANK-03", "LS-RUN-03"}
    assert list((tmp_path / "runs").iterdir()) == []
    setup = 'launch.setup=["[ $SLURM_NODEID = 0 ] || export NCCL_P2P_DISABLE=1"]'
    done = lockstep(slurm, tmp_path, "doctor", "c.yaml", *words, setup)
    assert "LS-GPU-02 warning: node2: NCCL_P2P_DISABLE=1" in done.stdout, done.stdout + done.stderr
    setup = 'launch.setup=["[ $SLURM_NODEID = 0 ] || exit 0"]'
    done = lockstep(slurm, tmp_path, "doctor", "c.yaml", *words, setup, "launch.join_timeout_seconds=3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "LS-NODE-01 error: only 1 of 2 machines joined" in done.stdout, done.stdout + done.stderr


def test_cancelled_jobs_stay_cancelled(slurm, tmp_path):
    """`lockstep cancel` saves first; scancel does not; neither is requeued."""
    for name in ("kind", "rude"):
        (tmp_path / name).mkdir()
    kind, rude = (Run(slurm, tmp_path / name, "launch.nodes=1") for name in ("kind", "rude"))
    kind.is_held()
    assert "to save and stop" in lockstep(slurm, kind.top, "cancel", "runs/a").stdout
    kind.goes_on()
    rude.is_held()
    slurm.run("head", "scancel", rude.job)
    for run in (kind, rude):
        assert slurm.wait_for(run.job, ("FAILED", "CANCELLED"))
    time.sleep(3)
    for run in (kind, rude):
        assert slurm.state(run.job) in ("FAILED", "CANCELLED"), run.said
        assert "is requeued" not in run.said
    assert "stopped by a signal after step" in kind.said


def test_the_example_is_handed_in_by_plain_sbatch(slurm, tmp_path, plain):
    """As its own words say."""
    write(tmp_path, is_held=False)
    text = EXAMPLE.read_text()
    assert "PATH=$PWD/.venv/bin:$PATH" in text
    (tmp_path / "train.slurm").write_text(text.replace("$PWD/.venv/bin", os.path.dirname(sys.executable)))
    job = slurm.submit(
        "--nodes=2", "--job-name=mine", "train.slurm", "c.yaml", *SETTINGS, "launch.processes=1", cwd=tmp_path
    )
    slurm.wait_for(job, ("COMPLETED",))
    summary = json.loads((tmp_path / "runs" / f"mine-{job}" / "summary.json").read_text())
    assert (summary["digest"], summary["world_size"]) == (plain, 2)
