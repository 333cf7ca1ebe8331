"""`lockstep watch`: what it shows of a run, live and at the end, on terminals of any width."""

import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import pytest
from rich.console import Console
from running import LONG, SHORT, lockstep, started, wait_for_steps

from lockstep.base.errors import ConfigError
from lockstep.observe.watch.run_state import RunReader
from lockstep.observe.watch.screen import screen

CONFIG = "data: {kind: digits}\nmodel: {kind: cnn}\nlaunch: {processes: 2}\n"


def shown(state, width, now=None):
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(screen(state, width=width, now=now))
    return text.getvalue().splitlines()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    (folder / "c.yaml").write_text(CONFIG)
    done = lockstep(folder, "train", "c.yaml", "run.name=a", *SHORT)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "a"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_matters_is_there_at_any_width(run, width):
    lines = shown(RunReader(run).state(), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("a · finished · 2 processes · ")
    assert re.match(r"step 52/52 · epoch 4 +━+$", lines[1].rstrip())
    assert re.search(r"^train · .*loss \d\.\d{4}", text, re.MULTILINE)
    assert re.search(r"^test after step 52 · loss \d\.\d{4} · accuracy \d\.\d{4}", text, re.MULTILINE)
    assert re.search(r"\d\.\d\d GB on rank 0 · checkpoint of step 52 at \d\d:\d\d:\d\d", text)
    assert len(re.findall(r"^ +[01] +\d+\.\d( +\d+\.\d)+ +\d\.\d\d GB$", text, re.MULTILINE)) == 2
    assert ("backward" in text) == (width == 120)
    assert lines[-1].endswith("step 52: finished")


def test_the_command_where_there_is_no_terminal(run):
    done = lockstep(run.parent, "watch", "a", env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("a · finished · 2 processes · ")
    assert "\x1b" not in done.stdout


def read_until(terminal, expected, seconds=30):
    """What a program writes to its terminal until a text has come."""
    found, end = "", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                found += os.read(terminal, 1 << 16).decode(errors="replace")
            except OSError:  # its process has ended
                break
        if re.search(expected, found):
            return found
    raise AssertionError(f"no {expected!r} in {found!r}")


def test_live_in_a_terminal(tmp_path):
    """It moves while the run goes on; Ctrl-C ends only the watching; at the run's end it ends by itself."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    training = started(tmp_path, "train", "c.yaml", "run.name=a", *LONG)
    wait_for_steps(tmp_path / "runs" / "a", 5)
    for end in ("Ctrl-C", "the end of the run"):
        terminal, other = pty.openpty()
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
        command = [sys.executable, "-m", "lockstep", "watch", "runs/a"]
        watching = subprocess.Popen(
            command, cwd=tmp_path, stdin=other, stdout=other, stderr=other, start_new_session=True
        )
        os.close(other)
        first = read_until(terminal, r"step [\d,]+/13,000 · epoch \d+")
        number = re.search(r"step ([\d,]+)/", first)[1]
        read_until(terminal, rf"step (?!{number}/)[\d,]+/13,000")
        (watching if end == "Ctrl-C" else training).send_signal(signal.SIGINT)
        text = read_until(terminal, r"\x1b\[\?25h")
        assert watching.wait(timeout=30) == 0
        assert "Traceback" not in text
        assert end != "Ctrl-C" or training.poll() is None
        os.close(terminal)
    assert "interrupted" in text
    training.communicate(timeout=60)


def line(kind, step, **values):
    return json.dumps({"time": 1000.0 + step, "kind": kind, "step": step, **values}) + "\n"


@pytest.fixture
def crafted(tmp_path):
    (tmp_path / "recipe.yaml").write_text("{}")
    return tmp_path


def test_a_run_that_has_not_begun(crafted):
    (crafted / "recipe.yaml").rename(crafted / "launch.yaml")
    assert shown(RunReader(crafted).state(), 80) == [f"{crafted.name}: waiting for its first step"]


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing is no run: there is no such folder"):
        RunReader(tmp_path / "nothing").state()
    with pytest.raises(ConfigError, match=r"is no run: there is no recipe.yaml in it"):
        RunReader(tmp_path).state()
    (tmp_path / "my-first-run").mkdir()
    with pytest.raises(ConfigError, match=r"there is no such folder — did you mean 'my-first-run'\?"):
        RunReader(tmp_path / "my-frist-run").state()


def test_a_growing_history_is_read_on(crafted):
    """With lines in parts, after a kill, and after the file was replaced."""
    file, reader = crafted / "history.jsonl", RunReader(crafted)
    file.write_text(line("started", 0, world_size=2, total_steps=100, steps_per_epoch=10) + '{"time": 10')
    assert reader.state().step == 0
    file.write_text(file.read_text() + "20.0" + line("steps", 20, seconds=1.0)[len('{"time": 1020.0') :])
    assert reader.state().step == 20
    assert "left" in shown(reader.state(), 80, now=1021.0)[1]
    with file.open("a") as appended:
        appended.write(line("steps", 30, seconds=1.0) + "nonsense\n" + line("started", 20, world_size=3))
        appended.write(line("warned", 21, message="rank 1 is slow \x1b[31m"))
    state = reader.state()
    assert state.start.world_size == 3
    text = "\n".join(shown(state, 200))
    assert "ended without a word after step 30: killed" in text
    assert "resumed at step 20 on 3 processes" in text
    assert "rank 1 is slow \\x1b[31m" in text
    file.write_text(line("started", 0))
    assert reader.state().step == 0


def test_figures_of_gpus_are_beside_the_memory(crafted):
    """As far as the line has them: one from elsewhere may have fewer than ranks."""
    gpus = {"celsius": [61.0, 88.4], "watts": [300.0], "new": [1.0, 2.0]}
    text = line("started", 0, world_size=2, total_steps=10)
    text += line("ranks", 10, steps=10, ranks=[0, 1], phases={"forward": [0.2, 0.1]}, gpus=gpus)
    (crafted / "history.jsonl").write_text(text)
    lines = shown(RunReader(crafted).state(), 80)
    assert any(each.endswith("GPU") for each in lines)
    assert [each for each in lines if "°C" in each][0].endswith("300 W, 61 °C")
    assert [each for each in lines if "°C" in each][1].endswith(" 88 °C")


def test_many_ranks(crafted):
    ranks = list(range(20))
    phases = {"forward": [0.1 * (rank + 1) for rank in ranks], "exchange": [0.0] * 20}
    memory = [10**9] * 20
    text = line("started", 0, world_size=20, total_steps=10)
    text += line("ranks", 10, steps=10, ranks=ranks, phases=phases, memory_by_rank=memory)
    (crafted / "history.jsonl").write_text(text)
    lines = [each for each in shown(RunReader(crafted).state(), 80) if each.endswith("GB")]
    assert [each.split()[:2] for each in lines] == [[str(rank), f"{10 * (rank + 1):.1f}"] for rank in range(19, 11, -1)]
