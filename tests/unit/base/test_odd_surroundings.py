"""Surroundings that nobody asks for: no home or working folder, variables of torch's, observers that fail at the end."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from members import further

from lockstep.base.events import Bus, Warned
from lockstep.base.world import World
from lockstep.core.distributed import process_group


class Heard:
    def __init__(self):
        self.messages = []

    def notice(self, event):
        if isinstance(event, Warned):
            self.messages.append(event.message)

    def close(self):
        pass


class Failing(Heard):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def close(self):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("not saved"), SystemExit(3)])
def test_an_observer_that_fails_in_close_is_named_and_others_are_closed(error):
    bus, heard = Bus(), Heard()
    for observer in (heard, Failing(error), Heard()):
        bus.subscribe(observer)
    bus.close()
    assert not bus.observers
    assert len(heard.messages) == 1
    assert heard.messages[0].startswith(f"the observer test_odd_surroundings.Failing failed in close(): {error!r}"[:64])


def test_the_debug_level_that_crashes_torch_is_lowered_with_a_word(capfd):
    before = dist.get_debug_level()
    try:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        with process_group.opened(World(), torch.device("cpu")):
            assert dist.get_debug_level() == dist.DebugLevel.INFO
    finally:
        dist.set_debug_level(before)
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL counts as INFO" in capfd.readouterr().err


DELETED = """
import os, shutil, sys
from lockstep.cli import _app
shutil.rmtree(os.getcwd())
sys.argv = ["lockstep", "doctor"]
_app.main()
"""


def test_a_deleted_working_folder(tmp_path):
    (tmp_path / "gone").mkdir()
    line = [sys.executable, "-c", DELETED]
    found = subprocess.run(line, cwd=tmp_path / "gone", capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr == "the working folder has been deleted: change to another one (cd)\n"


def test_a_user_without_a_home_folder(tmp_path):
    if not shutil.which("unshare"):
        pytest.skip("user namespaces cannot be made here")
    unknown = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "XDG_STATE_HOME")}
    line = ["unshare", "-U", "--map-user=12345", "--map-group=12345", sys.executable, "-m", "lockstep", "plugins"]
    found = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=unknown)
    if "unshare:" in found.stderr:
        pytest.skip("user namespaces cannot be made here")
    assert found.returncode == 2, found.stderr
    assert found.stderr.startswith("this user has no home folder (no HOME, no entry in /etc/passwd)")


CONFIG = """
run: {name: a, device: cpu, dir: small}
data: {kind: digits, limit: 64}
model: {kind: cnn}
train: {steps: 1, global_batch: 32, micro_batch: 16}
evaluate: {limit: 32}
"""
FILLING = """
from pathlib import Path


def fill():
    number = 0
    while True:
        try:
            Path("small", str(number)).touch()
        except OSError:
            return
        number += 1


class Filling:
    def __init__(self, at):
        self.at = at

    def notice(self, event):
        if type(event).__name__ == self.at:
            fill()

    def close(self):
        pass


def observers(options):
    if options["at"] == "start":
        fill()
    return [Filling(options["at"])]
"""
"""An observer that takes the last inodes of a disk."""
SMALL_DISK = 'mkdir -p small; mount -t tmpfs -o size=64m,nr_inodes=60 none small && exec "$@"'


def trained_within(namespaces, script, folder, *overrides):
    """What `lockstep train` says after a shell script in namespaces of its own."""
    if not shutil.which("unshare"):
        pytest.skip("user namespaces cannot be made here")
    (folder / "c.yaml").write_text(CONFIG)
    train = [sys.executable, "-m", "lockstep", "train", "c.yaml", *overrides]
    line = ["unshare", "--map-root-user", *namespaces, "sh", "-c", script, "sh", *train]
    found = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=100)
    if "unshare:" in found.stderr or "mount:" in found.stderr:
        pytest.skip("user namespaces cannot be made here")
    return found


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("start", "/recipe.yaml could not be written: No space left on device ("),
        ("RunStarted", "the last checkpoint, of step 1, could not be saved in "),
        ("CheckpointSaved", "/summary.json could not be written: No space left on device ("),
    ],
)
def test_a_disk_without_inodes_is_told_in_one_line(tmp_path, at, said):
    (tmp_path / "filling.py").write_text(FILLING)
    own = ["observe.file=filling.py", f"observe.options={{at: {at}}}"]
    found = trained_within(["--mount"], SMALL_DISK, tmp_path, *own)
    assert found.returncode == 2 and "Traceback" not in found.stderr, found.stderr
    told = [line for line in found.stderr.splitlines() if not line.startswith("warning: ")]
    assert said in told[0] and "60 inodes, and every file takes one: delete files there" in found.stderr
    assert len(told) == (2 if at == "RunStarted" else 1), told


WORKER = 'python=$1; shift 4; exec "$python" -m lockstep.run.worker "$@"'


@pytest.mark.parametrize("start", ["processes: 2", "a worker by itself", *further("processes: 1", "kind: spawn")])
def test_a_loopback_that_is_down_is_told_in_one_line(tmp_path, start):
    script, own = (WORKER, []) if start.startswith("a ") else ('exec "$@"', [f"launch={{{start}}}"])
    found = trained_within(["--net"], script, tmp_path, "run.dir=runs", *own)
    assert found.returncode == 2, found.stderr
    assert found.stderr == (
        "this machine cannot reach its own address 127.0.0.1, at which processes meet: bring its loopback interface "
        "up (`ip link set lo up`)\n"
    )
