"""The sbatch script that is submitted, and the example, which is rendered from the same template."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from golden import matches
from places import EXAMPLES

from lockstep.base.config import dump, parse
from lockstep.base.contracts import Request
from lockstep.base.errors import ConfigError, LaunchError
from lockstep.base.templates import render
from lockstep.launch.launchers.slurm import Config, Slurm, quote
from lockstep.recipe.recipe import Recipe

EXAMPLE = EXAMPLES / "slurm" / "train.slurm"
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

LIVE = "{kind: slurm, nodes: 4, recovery: live, partition: cpu, setup: [ulimit -n 65536], options: ['--nodelist=n[1-4]', --exclude=n9]}"


def example():
    """examples/slurm/train.slurm: the same template with values that a user edits."""
    return render(
        "launch/launchers/slurm.sh.j2",
        header="\n#".join(
            [
                "Trains a config on one node or several:",
                "",
                "     sbatch examples/slurm/train.slurm CONFIG.yaml [section.key=value ...]",
                "     sbatch --nodes=4 --gres=gpu:8 examples/slurm/train.slurm CONFIG.yaml",
                "",
                " Edit the lines down to `srun` for your cluster. `lockstep train CONFIG.yaml launch.kind=slurm` renders the",
                " same script from the config, and submits it.",
                "",
            ]
        ),
        job_name="lockstep",
        nodes=1,
        cpus=2,
        output="%x-%j.out",
        config=Config(kind="slurm", time="1:00:00", setup=("PATH=$PWD/.venv/bin:$PATH # where Lockstep is installed",)),
        command="lockstep",
        arguments='"${1:?name a config}" launch.kind=slurm "launch.nodes=$SLURM_NNODES" '
        '"run.name=$SLURM_JOB_NAME-$SLURM_JOB_ID" "${@:2}"',
        is_elastic=False,
        options=(),
        srun_options=(),
        quote=quote,
    )


def script(text, name="train.slurm"):
    """The script that the launcher submits for a `launch:` section."""
    config = parse(Recipe, f"launch: {text}", file="c.yaml").launch
    request = Request(recipe=Path("/home/me/my runs/digits/launch.yaml"), arguments=("--resume", "auto"))
    plan = Slurm(config, threads=1, shards=8).plan(request)
    return plan.files[Path("/home/me/my runs/digits") / name].replace(sys.executable, "/home/me/venv/bin/python")


SCRIPTS = {
    "one.slurm": lambda: script("{kind: slurm}"),
    "everything.slurm": lambda: script(EVERYTHING),
    "apptainer.slurm": lambda: script(APPTAINER),
    "example.slurm": example,
    "live.slurm": lambda: script(LIVE),
    "join.slurm": lambda: script(LIVE, "join.slurm"),
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
    assert EXAMPLE.read_text() == example()


def test_no_setting_breaks_out_of_its_line(tmp_path):
    """Quotes and commands reach the container as they are, only variables are expanded; line breaks are refused."""
    text = script(
        """{kind: slurm, container: "a'; echo \\"$x\\" `b`", container_kind: apptainer, partition: "p; q'r"}"""
    )
    (line,) = [line for line in text.splitlines() if "apptainer" in line]
    shell = ["bash", "-c", f"printf '%s\\n' {line.removesuffix(chr(92))}"]  # $NAME is expanded, and nothing else
    words = subprocess.run(shell, env={"x": "$(id)"}, capture_output=True, text=True, check=True).stdout
    assert 'a\'; echo "$(id)" `b`' in words.splitlines()
    (partition,) = [line for line in text.splitlines() if "--partition" in line]
    assert shlex.split(partition.removeprefix("#SBATCH ")) == ["--partition=p; q'r"]
    with pytest.raises(ConfigError, match="launch.partition"):
        parse(Recipe, 'launch: {kind: slurm, partition: "p\\nrm x"}', file="c.yaml")
    launcher = Slurm(parse(Recipe, "launch: {kind: slurm}", file="c.yaml").launch, threads=1, shards=1)
    with pytest.raises(LaunchError, match="line break"):
        launcher.plan(Request(recipe=tmp_path / "a\nb" / "launch.yaml"))


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


@pytest.mark.parametrize(
    ("time", "is_short"),
    [("1", True), ("2:00", True), ("3", False), ("0:02:01", False), ("0-00:02", True), ("1-00", False), ("0", False)],
)
def test_a_time_limit_below_the_warning_is_told(tmp_path, time, is_short):
    said = planned(tmp_path, f"{{kind: slurm, time: '{time}', warning_seconds: 120}}").warnings
    assert ["launch.warning_seconds=120" in each for each in said] == [True] * is_short


def test_what_is_outside_of_the_container_is_told(tmp_path):
    for name in ("code", "data", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "code" / "net.py").touch()
    files = f"{tmp_path}/data, {tmp_path}/code/net.py would not be in the container"

    def said(mounts, kind="pyxis"):
        launch = f"{{kind: slurm, container: image, container_kind: {kind}, mounts: {mounts}}}"
        return planned(tmp_path, launch).warnings

    assert [files in each for each in said("[]")] == [True]
    assert f"{tmp_path}/code/net.py would not be" in said(f"['{tmp_path}/data', '/scratch/code:/code']")[0]
    assert said(f"['{tmp_path}/data:{tmp_path}/data:ro', '{tmp_path}/code']") == ()
    assert not said("[]", "apptainer")  # which has /tmp
    assert planned(tmp_path, "{kind: slurm}").warnings == ()


def planned(folder, launch):
    recipe = parse(
        Recipe,
        f"launch: {launch}\nmodel: {{kind: user, file: {folder}/code/net.py}}\ndata: {{kind: mnist, root: {folder}/data}}\n",
        file="c.yaml",
    )
    request = Request(recipe=folder / "runs" / "a" / "launch.yaml", text=dump(recipe))
    return Slurm(recipe.launch, threads=1, shards=1).plan(request)


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
