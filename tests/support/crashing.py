"""Kills a training process at every file operation of a save, one after the other; each time the run is resumed.

warm.run(["crashing", FOLDER, WORLD, VICTIM, EVERY]) prints a line of JSON per point tried, one of EVERY. Processes are
forked from this one, in which everything has been imported once.
"""

import io
import json
import os
import pathlib
import signal
import socket
import sys
import time

from lockstep.checkpoint import verify
from lockstep.run import worker
from lockstep.training.saving import Saving

STEPS = 4
SETTINGS = ["data: {kind: digits, limit: 40}", "observe: {sinks: [jsonl], log_every: 1}", "parallel: {kind: ddp}"]
SETTINGS += ["checkpoint: {every_steps: 1, keep: 1}", "evaluate: {every_epochs: null, micro_batch: 400}"]
SETTINGS += ["model: {kind: user, file: MODEL}"]
MODEL = """
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, batch):
        return self.linear(batch["image"].flatten(1) / 16)


def build(options, spec):
    return Model()
"""
SETTINGS += [f"train: {{steps: {STEPS}, global_batch: 8, micro_batch: 4}}"]
AUDITED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}


class Shim:
    """Counts operations on files below a folder, in all threads, and ends the process at the n-th.

    A write that is the n-th writes half of its bytes first.
    """

    def __init__(self, folder, last):
        self.folder, self.last, self.count, self.is_armed = str(folder), last, 0, True

    def reached(self, what):
        self.count += self.is_armed
        if self.is_armed and self.count == self.last:
            note = os.open(f"{self.folder}/../killed-at", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(note, what.encode())
            return True
        return False

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event, arguments):
        path = arguments[0] if arguments else None
        is_ours = event in AUDITED and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)
        if is_ours and self.reached(f"{event} {os.path.basename(path)}"):
            self.die()

    def install(self):
        plain_open, plain_sync, shim = pathlib.Path.open, os.fsync, self

        class Torn(io.FileIO):
            """A file whose writes, as the system sees them, are counted."""

            def write(self, data):
                if shim.reached(f"write {os.path.basename(self.name)}"):
                    super().write(bytes(data)[: len(data) // 2])
                    shim.die()
                return super().write(data)

        def opened(path, mode="r", *rest, **named):
            if "w" in mode and str(path).startswith(self.folder):
                return io.BufferedWriter(Torn(str(path), "w"))
            return plain_open(path, mode, *rest, **named)

        def synced(handle):
            if os.readlink(f"/proc/self/fd/{handle}").startswith(self.folder) and self.reached("fsync"):
                self.die()
            return plain_sync(handle)

        pathlib.Path.open, os.fsync = opened, synced
        sys.addaudithook(self.audit)


def arm(folder, last):
    """For the second save, from its first operation to its last, with the deletion of the first one's checkpoint."""
    shim, start, saves = Shim(folder, last), Saving.start, []

    def counted(saving, metrics, **more):
        saving.finish()
        saves.append(metrics)
        if len(saves) == 2:
            shim.install()
        shim.is_armed = len(saves) == 2
        start(saving, metrics, **more)

    Saving.start = counted


def forked(config, rank, world, port, before=lambda: None):
    """A process that trains; returns its id."""
    process = os.fork()
    if process == 0:
        code = 70
        try:
            log = os.open(f"{config.parent}/output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ.update({name: str(value) for name, value in {**names, "MASTER_PORT": port}.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            before()
            code = worker.main([str(config)])
        finally:
            os._exit(code)
    return process


def trained(config, world, victim=None, last=0):
    """Train on so many processes -> exit statuses; one of them dies at its n-th file operation."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    root = config.parent / "runs" / "a" / "checkpoints"
    processes = [
        forked(config, rank, world, port, (lambda: arm(root, last)) if rank == victim else lambda: None)
        for rank in range(world)
    ]
    return [os.waitpid(process, 0)[1] for process in processes]


def point(folder, world, victim, last):
    """Kill at one operation, look, resume -> what happened; where there is no such operation, the digest of the run that nobody disturbed."""
    folder.mkdir()
    config = folder / "c.yaml"
    (folder / "model.py").write_text(MODEL)
    settings = [line.replace("MODEL", f"{folder}/model.py") for line in SETTINGS]
    config.write_text("\n".join([f"run: {{dir: {folder}/runs, name: a}}", *settings]))
    start = time.monotonic()
    statuses = trained(config, world, victim, last)
    if statuses[victim] == 0:
        return {"undisturbed": json.loads((folder / "runs" / "a" / "summary.json").read_text())["digest"]}
    whole = verify.newest(folder / "runs" / "a" / "checkpoints", lambda *_: None)
    after = trained(config, world) if whole else [-1]
    summary = json.loads((folder / "runs" / "a" / "summary.json").read_text()) if not any(after) else {}
    steps = [json.loads(line)["step"] for line in (folder / "runs" / "a" / "metrics.jsonl").read_text().splitlines()]
    return {
        "killed": os.WTERMSIG(statuses[victim]) == signal.SIGKILL,
        "at": (folder / "runs" / "a" / "killed-at").read_text(),
        "whole": whole and whole.name,
        "digest": summary.get("digest"),
        "steps": steps,
        "left": sorted(path.name for path in (folder / "runs" / "a" / "checkpoints").iterdir()),
        "seconds": round(time.monotonic() - start, 2),
    }


def main(folder, world, victim, every):
    last = 0
    while True:
        last += int(every)
        found = point(pathlib.Path(folder) / f"point-{last}", int(world), int(victim), last)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        if "undisturbed" in found:
            return


def run(words):
    main(*words)
    sys.exit()
