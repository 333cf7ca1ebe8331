"""The worker under the ecosystem's own launcher, and under none: always the digest of the lone process."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import warm
from places import ROOT

SCRIPTS = ROOT / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SHORT = ["data.limit=400", "train.epochs=2", "train.global_batch=32", "train.micro_batch=8"]


def worker(name):
    return ["-m", "lockstep.run.worker", "c.yaml", *SHORT, f"run.name={name}"]


def ran(folder, *commands, environment=None, **variables):
    """Run commands beside each other, all of them to their end."""
    environment = {**(os.environ if environment is None else environment), **variables}
    started = [
        subprocess.Popen(c, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for c in commands
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)
    return outputs


def found(folder, name):
    """Digest and number of processes of a run."""
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    return summary["digest"], summary["world_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config on the digits."""
    made = tmp_path_factory.mktemp("torchrun")
    (made / "c.yaml").write_text("data: {kind: digits}\n")
    return made


@pytest.fixture(scope="module")
def digest(folder):
    """Of a lone process, which nothing launches."""
    done = warm.run([*worker("one")[1:]], cwd=folder, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    digest, world_size = found(folder, "one")
    assert world_size == 1
    return digest


def test_one_machine_agrees_on_a_name_and_a_time(folder, digest):
    """Without run.name, rank 0's clock names the run for all."""
    ran(folder, [*TORCHRUN, "--standalone", "--nproc-per-node=2", *worker("")[:-1]])
    (run,) = (folder / "runs").glob("c-2*")
    assert found(folder, run.name) == (digest, 2)


@pytest.mark.matrix
def test_two_agents_with_static_rendezvous(folder, digest, free_port):
    where = ["--master-addr=127.0.0.1", f"--master-port={free_port}"]
    agents = [[*TORCHRUN, "--nnodes=2", f"--node-rank={rank}", *where, "--nproc-per-node=1"] for rank in range(2)]
    ran(folder, *([*agent, *worker("static")] for agent in agents))
    assert found(folder, "static") == (digest, 2)


def test_two_agents_with_c10d_rendezvous(folder, digest, free_port):
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--local-addr=127.0.0.1"]
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=7", *where]
    ran(folder, *[[*agent, *worker("c10d")]] * 2)
    assert found(folder, "c10d") == (digest, 2)


@pytest.mark.matrix
def test_the_script_runs_from_any_folder(folder, digest):
    """On two processes where there is no GPU, on as many as are asked for otherwise."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = str(SCRIPTS / "run_ddp.sh")
    ran(folder, [script, "3", *SHORT, "run.name=three"], PATH=path, CONFIG="c.yaml", CUDA_VISIBLE_DEVICES="")
    assert found(folder, "three") == (digest, 3)
    own = ["data.kind=digits", "optim=null", "schedule=null", "checkpoint=null", "train.precision=fp32", *SHORT]
    ran(folder, [script, *own, "run.name=mnist"], PATH=path, CUDA_VISIBLE_DEVICES="")
    assert found(folder, "mnist") == (digest, 2)


def bare_shell(**variables):
    """The variables of a shell in which no environment is active: its Python has no Lockstep."""
    kept = {name: os.environ[name] for name in ("HOME", "LOCKSTEP_TEST_SESSION") if name in os.environ}
    return {**kept, "PATH": "/usr/bin:/bin", **variables}


@pytest.fixture
def checkout(tmp_path):
    """A clone with a .venv of its own, as `make setup` leaves it -> its script."""
    shutil.copytree(SCRIPTS, tmp_path / "clone" / "scripts")
    shutil.copytree(ROOT / "examples", tmp_path / "clone" / "examples")
    python = tmp_path / "clone" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    path = os.pathsep.join(filter(None, sys.path))
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(tmp_path / "clone" / "scripts" / "run_ddp.sh")


def test_the_script_runs_from_a_shell_without_an_environment(folder, digest, checkout):
    """It finds .venv, and nothing but the run is heard: no banner of torchrun's."""
    words = [checkout, "2", "c.yaml", *SHORT]
    (said,) = ran(folder, [*words, "run.name=bare"], environment=bare_shell())
    assert found(folder, "bare") == (digest, 2)
    assert said.startswith("run bare: ") and "OMP" not in said and "*****" not in said


def test_the_script_takes_another_script(folder, checkout):
    """With its arguments, once for each process; its exit code is the script's."""
    (folder / "mine.py").write_text(
        "import os, sys\nopen(f'mine-{os.environ[\"RANK\"]}', 'w').write(' '.join(sys.argv[1:]))\nsys.exit(3)"
    )
    done = subprocess.run([checkout, "2", "mine.py", "--lr=1", "--help"], cwd=folder, env=bare_shell(), timeout=100)
    assert done.returncode == 3
    assert [(folder / f"mine-{rank}").read_text() for rank in (0, 1)] == ["--lr=1 --help"] * 2


@pytest.mark.matrix
def test_the_script_keeps_the_threads_of_the_config(folder, checkout):
    two = ["run.threads=2", "train.epochs=1"]
    ran(folder, [checkout, "2", *SHORT, *two, "run.name=threads"], environment=bare_shell(CONFIG="c.yaml"))
    ran(folder, [sys.executable, *worker("lone"), *two])
    assert found(folder, "threads")[0] == found(folder, "lone")[0]


@pytest.mark.parametrize(
    ("words", "config", "code", "fragment"),
    [
        (["--help"], "c.yaml", 0, "GPUS: how many processes"),
        (["two"], "", 2, "GPUS should be a number above 0, not 'two'; then CONFIG.yaml or SCRIPT.py"),
        (["2", "none.py", "--epochs=1"], "", 2, "there is no file none.py"),
        (["c.yaml", "trian.epochs=3"], "", 2, "command line: trian: unknown key"),
        (["0"], "c.yaml", 2, "GPUS should be a number above 0, not '0'"),
        (["2"], "nothing.yaml", 2, "there is no file nothing.yaml"),
        (["2", "trian.epochs=3"], "c.yaml", 2, "command line: trian: unknown key — did you mean 'train'?"),
    ],
)
def test_mistakes_of_the_script_are_told_once(folder, checkout, words, config, code, fragment):
    command = [checkout, *words]
    done = subprocess.run(
        command, cwd=folder, env=bare_shell(CONFIG=config), capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, (done.stdout + done.stderr).count(fragment)) == (code, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_says_that_nothing_is_installed(tmp_path):
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    done = subprocess.run([tmp_path / "scripts" / "run_ddp.sh"], env=bare_shell(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Lockstep is not installed here: run `make setup` in {tmp_path}, or activate the environment that has it\n"
    )


def test_the_scripts_are_scripts():
    shell, batch = SCRIPTS / "run_ddp.sh", SCRIPTS / "run_ddp.bat"
    subprocess.run(["bash", "-n", shell], check=True, timeout=10)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", shell], check=True, timeout=30)
    assert os.access(shell, os.X_OK)
    assert b"\r" not in shell.read_bytes()
    lines = batch.read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\r\n") for line in lines)
    assert "*.bat text eol=crlf" in (ROOT / ".gitattributes").read_text()
