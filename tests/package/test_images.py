"""The images of deploy/, built without a registry, and what they are for: run as a user who is not root, on a root
file system that is read-only, without a network."""

import base64
import io
import json
import shutil
import time

import numpy as np
import pytest
import warm
from containers import CONTAINER, built, podman, ran, size_of, why_not
from PIL import Image
from places import ROOT
from sklearn.datasets import load_digits

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
ASK = """
import json, sys, urllib.request
body = sys.stdin.read().encode() or None
request = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""
"""Given to a container's own Python, since nothing outside reaches its network."""


@pytest.fixture(scope="module")
def images():
    return built()


@pytest.fixture(scope="module")
def workspace(images, tmp_path_factory):
    """A volume with a run of the digits, its exports and its Space, all made in the image for training."""
    folder = tmp_path_factory.mktemp("workspace")
    shutil.copy(ROOT / "examples" / "digits.yaml", folder)
    shutil.chown(folder, 1000, 1000)
    lockstep(folder, "train", "digits.yaml", "run.name=demo", "train.epochs=1", "launch.processes=2")
    lockstep(folder, "evaluate", "runs/demo")
    lockstep(folder, "export", "runs/demo")
    lockstep(folder, "export", "runs/demo", "--space")
    return folder


def lockstep(folder, *words):
    return podman("run", "--rm", *CONTAINER, "--volume", f"{folder}:/workspace", "localhost/lockstep", *words)


def test_the_image_for_training_gives_the_bits_of_this_machine(workspace, tmp_path):
    """Its processes are user 1000, and no warning tells of a folder that could not be written."""
    words = [
        "lockstep",
        "train",
        str(workspace / "digits.yaml"),
        "run.name=demo",
        "train.epochs=1",
        f"run.dir={tmp_path}",
    ]
    done = warm.run([*words, "launch.processes=1"], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    here, there = (json.loads((runs / "demo" / "summary.json").read_text()) for runs in (tmp_path, workspace / "runs"))
    assert (there["world_size"], here["digest"]) == (2, there["digest"])
    assert {path.stat().st_uid for path in (workspace / "runs").rglob("*")} == {1000}


def served(image, *options):
    """Start a server -> its container, once its image's own health check says that it is well."""
    container = podman("run", "--detach", *CONTAINER, *options, f"localhost/{image}").strip()
    end = time.monotonic() + 120
    while ran("healthcheck", "run", container).returncode:
        assert time.monotonic() < end, podman("logs", container)
        time.sleep(0.5)
    return container


@pytest.mark.parametrize(
    ("image", "port", "folder"), [("lockstep-serve", 8000, "export"), ("lockstep-space", 7860, "space")]
)
def test_a_server_answers(workspace, image, port, folder):
    """Where /predict is for a sample of the test split, as it is on this machine."""
    export = workspace / "runs" / "demo" / folder
    if image == "lockstep-space":
        built(export)
    volume = ["--volume", f"{export}:/model:ro"] if image == "lockstep-serve" else []
    container = served(image, *volume)
    try:
        picture = io.BytesIO()
        Image.fromarray((load_digits().images[0] * 15).astype(np.uint8)).save(picture, "PNG")
        body = json.dumps({"image": base64.b64encode(picture.getvalue()).decode()})
        asked = [f"http://127.0.0.1:{port}/{route}" for route in ("predict", "health", "metrics")]
        ask = ["exec", "--interactive", container, "python", "-c", ASK]
        answers = [podman(*ask, url, input=body if url.endswith("predict") else "") for url in asked]
        assert podman("exec", container, "id", "-u").strip() == "1000"
    finally:
        podman("stop", "--time", "30", container)
        said = ran("logs", container)
        said = said.stdout + said.stderr
        state = podman("inspect", "--format", "{{.State.ExitCode}}", container).strip()
        podman("rm", container)
    assert json.loads(answers[0])["label"] == "0", said
    assert json.loads(answers[1])["status"] == "alive"
    assert "lockstep_requests" in answers[2]
    assert state == "0", said


def test_the_image_that_serves_is_small(images):
    assert size_of("lockstep-serve") <= 1.2e9
