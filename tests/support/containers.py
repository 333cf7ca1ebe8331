"""Images of deploy/ that scripts/images.sh has built, and containers that podman runs of them, as root on Debian."""

import os
import shutil
import subprocess
import sys

from places import ROOT, SUPPORT

NEEDED = ("buildah", "debootstrap", "podman", "runc")
CONTAINER = ["--network", "none", "--read-only", "--cap-drop", "all"]
"""No network, nothing to write to but volumes and /tmp, no privilege."""


def why_not():
    """Why no image can be built on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "images need root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in NEEDED if not shutil.which(name, path=path)]
    return f"images need {', '.join(missing)}: scripts/images.sh" if missing else ""


def built(*space):
    """Build the images, as `make images` does; with the folder of a Space, its too."""
    done = subprocess.run([ROOT / "scripts" / "images.sh", *map(str, space)], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    sys.stdout.write(done.stdout)
    return done.stdout


def ran(*words, within=(), **options):
    """Run podman, by a command that it is given to -> CompletedProcess with text output."""
    environment = {**os.environ, "CONTAINERS_CONF": str(SUPPORT / "containers.conf")}
    pipes = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    return subprocess.run([*within, "podman", *map(str, words)], **pipes, **options)


def podman(*words, **options):
    """Run podman, successfully -> its output."""
    done = ran(*words, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def size_of(image):
    return int(podman("image", "inspect", "--format", "{{.Size}}", f"localhost/{image}"))
