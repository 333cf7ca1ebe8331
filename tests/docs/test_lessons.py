"""The lessons run as a reader would run them, and their pages show what they print."""

import os
import re
import subprocess
import sys

import pytest
from places import ROOT
from running import lockstep

LESSONS = sorted((ROOT / "lessons").glob("*.py"))
PAGES = ROOT / "docs" / "lessons"
SAMPLE = ("01",)
"""Those that run by default; `make test-matrix` runs the others."""
UNRESOLVED = "hostname of the client socket cannot be retrieved"  # c10d, on a machine without a network


def run(folder, *command):
    """Standard output of a lesson that must succeed without a word on standard error."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # torchrun says on stderr that it sets this
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if UNRESOLVED not in line] == []
    return done.stdout


def blocks(lesson, language):
    page = (PAGES / f"{lesson.stem.replace('_', '-')}.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(lesson, marks=[] if lesson.stem[:2] in SAMPLE else pytest.mark.matrix, id=lesson.stem)
        for lesson in LESSONS  # what they print changes with PyTorch
    ],
)
def test_its_page_shows_what_it_prints(lesson, tmp_path):
    assert blocks(lesson, "text") == [run(tmp_path, str(lesson))]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_it_is_short_plain_and_listed(lesson):
    text = lesson.read_text()
    assert len(text.splitlines()) <= 60
    of_lockstep = [line for line in text.splitlines() if "lockstep" in line]
    assert of_lockstep in ([], ["from lockstep.run import teaching"])  # in a lesson that trains
    assert f"({lesson.stem.replace('_', '-')}.md)" in (PAGES / "README.md").read_text()


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_one_that_trains_ends_with_the_weights_of_lockstep(lesson):
    if "import teaching" in lesson.read_text():
        (printed,) = blocks(lesson, "text")
        assert printed.splitlines()[-1].startswith("Lockstep on ")


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_its_page_quotes_it(lesson):
    quoted = blocks(lesson, "python")
    assert quoted
    lines = {line.strip() for line in lesson.read_text().splitlines()}
    assert {line.strip() for block in quoted for line in block.splitlines()} - lines == set()


def test_processes_under_torchrun(tmp_path):
    lesson = ROOT / "lessons" / "02_processes.py"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert [run(tmp_path, *torchrun, str(lesson))] == blocks(lesson, "text")


def test_the_command_lists_and_runs_them(tmp_path):
    listed = lockstep(tmp_path, "learn").stdout
    assert [int(number) for number in re.findall(r"│ (\d+) +│", listed)] == [int(each.stem[:2]) for each in LESSONS]
    lesson = ROOT / "lessons" / "12_metrics.py"
    assert run(tmp_path, "-m", "lockstep", "learn", "12").partition("\n")[2] == blocks(lesson, "text")[0]
    shown = lockstep(tmp_path, "learn", "12", "--show")
    assert (shown.returncode, shown.stderr) == (0, "") and "mp.spawn" in shown.stdout
    wrong = lockstep(tmp_path, "learn", "99")
    assert (wrong.returncode, wrong.stdout) == (2, "") and wrong.stderr.startswith(
        "there is no lesson 99: there are 1, 2, 3, 4, 5,"
    )
