"""Processes that are not started again: from the command line, a script, a session without a file."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from running import LONG, SHORT, family, left_of, started, summary, wait_for_steps
from running import lockstep as command

import lockstep
from lockstep.base.errors import ConfigError
from lockstep.recipe import recipe as recipes

SPAWN = ["launch.kind=spawn", "launch.processes=2"]
SECTIONS = {
    "data": {"kind": "digits", "limit": 400},
    "train": {"epochs": 2, "global_batch": 32, "micro_batch": 8},
    "observe": {"log_every": 1},
}


@pytest.fixture
def config(tmp_path):
    """A config on the digits, in an empty folder."""
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\n")
    return tmp_path


def python(folder, text, *, stdin, **variables):
    """Run a script, as a file or by standard input, to its end -> what it has said."""
    text = textwrap.dedent(text)
    (folder / "script.py").write_text(text)
    line, given = ([sys.executable], text) if stdin else ([sys.executable, "script.py"], None)
    done = subprocess.run(
        line, cwd=folder, input=given, capture_output=True, text=True, timeout=120, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def ranks(process):
    """The spawned processes, in order."""
    children = psutil.Process(process.pid).children()
    return sorted(
        (p for p in children if "lockstep.run.worker" in " ".join(p.cmdline())), key=lambda p: (p.create_time(), p.pid)
    )


def blocks(pid, number):
    """Whether the process keeps this signal back for now."""
    mask = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("stdin", [False, True], ids=["script", "session"])
def test_from_python(tmp_path, stdin):
    """Without a guard, with redirected output, in an environment that claims to be a terminal: one run and its lines;
    on another number of processes the same bits; the environment is afterwards as it was."""
    done = python(
        tmp_path,
        f"""
        import contextlib, io, json, os, lockstep
        print("the script is read")
        before, out = dict(os.environ), io.StringIO()
        with contextlib.redirect_stdout(out):
            run = lockstep.spawn({SECTIONS}, "run.name=two", "train.epochs={1 + stdin}", processes={1 + stdin})
        assert dict(os.environ) == before
        found = [run.summary["digest"], run.summary["world_size"], [line["step"] for line in run.metrics], str(run.folder)]
        print(json.dumps([out.getvalue(), *found]))
        """,
        stdin=stdin,
        FORCE_COLOR="1",
    )
    once, found = done.stdout.splitlines()
    said, digest, world_size, steps, folder = json.loads(found)
    assert once == "the script is read"
    assert done.stderr == ""
    assert said.startswith("run two: ")
    assert said.endswith(f"everything is in {tmp_path / 'runs' / 'two'}\n")
    assert "\x1b" not in said
    assert world_size == 1 + stdin
    assert steps[-1] == 13 * (1 + stdin)
    assert folder == str(tmp_path / "runs" / "two")
    if stdin:
        text = json.dumps(SECTIONS)  # which is YAML, too
        (tmp_path / "c.yaml").write_text(text)
        done = command(tmp_path, "train", "c.yaml", "run.name=one", "launch.processes=1")
        assert done.returncode == 0, done.stderr
        assert summary(tmp_path, "one")["digest"] == digest


def test_a_scripts_import_path_and_prints(tmp_path):
    """Also entries that are no texts; what rank 0 prints comes at once, though it then ends without a flush."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "datasets.py").write_text("raise ImportError('another one is meant')")
    (tmp_path / "beside" / "only_here.py").write_text("")
    (tmp_path / "net.py").write_text(
        "import os, only_here\n\ndef build(options, spec):\n    print('printed')\n    os._exit(7)\n"
    )
    done = python(
        tmp_path,
        """
        import pathlib, sys
        sys.path += [pathlib.Path("beside"), "beside"]
        import lockstep
        try:
            lockstep.spawn({"data": {"kind": "digits"}}, "model={kind: user, file: net.py}", processes=1)
        except Exception as error:
            print(type(error).__name__, error.exit_code)
        """,
        stdin=False,
    )
    assert "printed" in done.stdout and done.stdout.endswith("RunFailed 7\n"), done.stdout + done.stderr


def test_what_went_wrong_is_raised(tmp_path):
    """A mistake that a worker finds, and an exception on one rank: as errors with the last words of whoever failed."""
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "import numpy as np\n"
        "from lockstep.data.in_memory import Images\n\n"
        "class Source(Images):\n"
        "    def __getitems__(self, indices):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            raise KeyError('sample is broken')\n"
        "        return super().__getitems__(indices)\n\n"
        "def source(options, split):\n"
        "    return Source(np.zeros((100, 1, 8, 8), np.uint8), np.zeros(100, int), ['a', 'b'])\n"
    )
    done = python(
        tmp_path,
        """
        import lockstep
        for name in "nowhere.py", "mine.py":
            try:
                lockstep.spawn({}, "data.kind=user", f"data.file={name}", processes=1 + (name == "mine.py"))
            except Exception as error:
                print(type(error).__name__, error.exit_code, error, flush=True)
        """,
        stdin=False,
    )
    first, second = done.stdout[: done.stdout.index("RunFailed")], done.stdout[done.stdout.index("RunFailed") :]
    assert first.startswith("UserError 2 data.file: there is no file")
    assert "Traceback" not in first
    assert second.startswith("RunFailed 1 rank 1 (process ")
    assert "sample is broken" in second
    assert 'mine.py", line 8' in second


def test_mistakes_are_found_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for sections, overrides, said in (
        ({"train": {"epohcs": 3}}, (), "config: train.epohcs: unknown key — did you mean 'epochs'?"),
        ({"train": {3, 4}}, ("train.epochs=two",), "command line: train.epochs: "),
        ({"launch": {"processes": 0}}, (), "config: launch.processes: "),
        (tmp_path / "no.yaml", (), "there is no file"),
    ):
        with pytest.raises(ConfigError) as raised:
            lockstep.spawn(sections, *overrides)
        assert said in str(raised.value)
    with pytest.raises(ConfigError, match="launch.processes"):
        lockstep.spawn({}, processes=0)
    assert not list(tmp_path.iterdir())


def test_a_kind_that_starts_once_says_so():
    for key, value in {"nodes": 2, "max_restarts": 1}.items():
        with pytest.raises(ConfigError, match=rf"config: launch.{key}: should be .*launch.kind=local"):
            recipes.of_sections({"launch": {"kind": "spawn", key: value}})


def test_a_rank_that_is_killed_is_named_and_not_started_again(config):
    """The exit code is that of the process; the same command goes on."""
    arguments = ["train", "c.yaml", *SHORT, *SPAWN, "run.name=a", "checkpoint.every_steps=3"]
    process = started(config, *arguments)
    wait_for_steps(config / "runs" / "a", 10)
    everyone, victim = family(process), ranks(process)[1]
    victim.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 137
    assert f"rank 1 (process {victim.pid}) was killed (SIGKILL" in output
    assert f"lockstep train {config / 'runs' / 'a' / 'recipe.yaml'}" in output
    assert not left_of(everyone, 1)
    again = command(config, *arguments)
    assert again.returncode == 0, again.stderr
    assert "resumed after step" in again.stdout
    assert (config / "runs" / "a" / "logs" / "rank-1.log").exists()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.matrix) for each in (signal.SIGINT, signal.SIGHUP))],
    ids=lambda n: n.name,
)
def test_a_signal_to_the_command_saves(config, number):
    process = started(config, "train", "c.yaml", *LONG, *SPAWN, "run.name=a")
    wait_for_steps(config / "runs" / "a", 5)
    everyone = family(process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)  # grace_seconds is 120
    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert "lockstep train" in output
    assert not left_of(everyone, 1)
    done = summary(config, "a")
    assert done["status"] == "interrupted"
    assert (config / "runs" / "a" / "checkpoints" / f"step-{done['steps']:09}" / "manifest.json").exists()


def test_ctrl_c_while_processes_start_is_answered_in_silence(config):
    """Before there is anything to save."""
    process = started(config, "train", "c.yaml", *LONG, *SPAWN, "run.name=a")
    end = time.monotonic() + 60
    while len(ranks(process)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert [blocks(rank.pid, signal.SIGINT) for rank in ranks(process)] == [True, True]
    everyone = family(process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert output == "ended by SIGINT\n"
    assert not left_of(everyone, 1)


def test_a_rank_ends_with_the_process_that_has_started_it(config):
    process = started(config, "train", "c.yaml", *LONG, *SPAWN, "launch.processes=1", "run.name=a")
    wait_for_steps(config / "runs" / "a", 3)
    everyone = ranks(process)
    assert len(everyone) == 1  # with others it would end for want of them
    process.kill()
    process.communicate(timeout=10)
    assert not left_of(everyone, 8)


@pytest.mark.matrix
def test_an_interrupt_in_python_leaves_a_resumable_run(tmp_path):
    """A notebook's stop button is a SIGINT for the kernel alone."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            f"""
            import json, lockstep
            from lockstep.base.errors import Interrupted
            try:
                lockstep.spawn({SECTIONS}, "run.name=a", "train.epochs=1000", processes=2)
            except Interrupted as error:
                print(error, flush=True)
            epochs = json.load(open("runs/a/summary.json"))["epochs"]
            run = lockstep.spawn("runs/a/recipe.yaml", f"train.epochs={{epochs + 0.5}}", allow_drift=True)
            print(run.summary["status"])
            """
        )
    )
    line = [sys.executable, "script.py"]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for_steps(tmp_path / "runs" / "a", 3)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert f'ended by SIGINT; go on with lockstep.train("{tmp_path / "runs" / "a" / "recipe.yaml"}")' in output
    assert "resumed after step" in output
    assert output.endswith("finished\n")
