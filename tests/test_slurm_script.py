"""What is handed in to Slurm: the generated script, and the example that is the same with other words at its head."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from golden import matches

from lockstep.base.config import parse
from lockstep.base.contracts import Request
from lockstep.base.errors import ConfigError
from lockstep.launch.launchers._batch_script import Script
from lockstep.launch.launchers.slurm import Slurm
from lockstep.run.recipe import Recipe

EXAMPLE = Path(__file__).parents[1] / "examples" / "slurm" / "train.slurm"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
EVERYTHING = """
  kind: slurm
  nodes: 2:4
  processes: 8
  partition: gpu
  account: lab
  time: 12:00:00
  gpus: 8
  cpus: 96
  memory: 500G
  options: [--constraint=a100, --mail-type=FAIL]
  modules: [cuda/12.8]
  setup: ['export NCCL_IB_HCA=mlx5', 'ulimit -n 65536']
  container: registry.example.org#lab/lockstep:1
  mounts: [/data, '/scratch/me:/tmp']
  warning_seconds: 300
"""
APPTAINER = "{kind: slurm, gpus: 1, container: images/lockstep.sif, container_kind: apptainer, time: 90}"


def example():
    """The script of the same words as examples/slurm/train.slurm."""
    return Script(
        opening=[
            "Trains a config on one machine or several:",
            "",
            "    sbatch examples/slurm/train.slurm CONFIG.yaml [section.key=value ...]",
            "    sbatch --nodes=4 --gres=gpu:8 examples/slurm/train.slurm CONFIG.yaml",
            "",
            "Edit the lines down to `srun` for your cluster. `lockstep train CONFIG.yaml launch.kind=slurm` writes the same",
            "script from the config, and submits it.",
        ],
        options={
            "job-name": "lockstep",
            "nodes": "1",
            "ntasks-per-node": "1",
            "cpus-per-task": "2",
            "time": "1:00:00",
            "signal": "B:USR1@120",
            "open-mode": "append",
            "output": "%x-%j.out",
            "requeue": None,
        },
        setup=["PATH=$PWD/.venv/bin:$PATH # where Lockstep is installed"],
        arguments='"${1:?name a config}" launch.kind=slurm "launch.nodes=$SLURM_NNODES" '
        '"run.name=$SLURM_JOB_NAME-$SLURM_JOB_ID" "${@:2}"',
        requeues=100,
    )


def script(text):
    """What the launcher hands in for a `launch:` section."""
    config = parse(Recipe, f"launch: {text}", file="c.yaml").launch
    request = Request(recipe=Path("/home/me/my runs/digits/launch.yaml"), arguments=("--resume", "auto"))
    plan = Slurm(config, threads=1, shards=8).plan(request)
    return plan.files[Path("/home/me/my runs/digits/train.slurm")].replace(sys.executable, "/home/me/venv/bin/python")


SCRIPTS = {
    "one.slurm": lambda: script("{kind: slurm}"),
    "everything.slurm": lambda: script(EVERYTHING),
    "apptainer.slurm": lambda: script(APPTAINER),
    "example.slurm": lambda: example().text(),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_as_approved(name):
    assert matches(SCRIPTS[name](), f"slurm/{name}")


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_good_shell(name, tmp_path):
    file = tmp_path / name
    file.write_text(SCRIPTS[name]())
    subprocess.run(["bash", "-n", file], check=True)
    done = subprocess.run([SHELLCHECK, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_example_is_the_generated_script():
    """With other words at its head: who edits it loses nothing."""
    assert EXAMPLE.read_text() == example().text()


def test_dry_run_hands_nothing_in(tmp_path):
    """And tells the variables that processes will have."""
    (tmp_path / "c.yaml").write_text(
        "launch: {kind: slurm, nodes: 2, debug: true, environment: {A: b}, time: 1:30:00}\n"
    )
    command = [sys.executable, "-m", "lockstep", "train", "c.yaml", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for line in ("OMP_NUM_THREADS=1", "NCCL_DEBUG=INFO", "A=b", "#SBATCH --nodes=2", "#SBATCH --time=1:30:00"):
        assert line in done.stdout.splitlines(), line
    assert [file.name for file in tmp_path.iterdir()] == ["c.yaml"]


def test_without_slurm_it_says_where_slurm_is(tmp_path):
    (tmp_path / "c.yaml").write_text("launch: {kind: slurm}\n")
    command = [sys.executable, "-m", "lockstep", "train", "c.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": str(tmp_path)}
    )
    assert (done.returncode, "there is no sbatch here" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("{time: soon}", "should be minutes, H:MM:SS or D-HH:MM:SS"),
        ("{nodes: 4:2}", "should be a number of machines, or MIN:MAX"),
        ("{nodes: 0}", "should be a number of machines, or MIN:MAX"),
        ("{container_kind: docker}", "'pyxis' or 'apptainer'"),
    ],
)
def test_mistakes_are_told(settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(Recipe, f"launch: {{kind: slurm, {settings[1:-1]}}}", file="c.yaml")


def test_times_and_ranges_are_no_numbers():
    """To YAML 1.1, 1:30:00 is 5400 and 1:4 is 64."""
    launch = parse(Recipe, "launch: {kind: slurm, time: 1:30:00, nodes: 1:4}", file="c.yaml").launch
    assert (launch.time, launch.min_nodes, launch.max_nodes) == ("1:30:00", 1, 4)
