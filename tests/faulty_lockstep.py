"""`lockstep`, whose training processes meet faults: `python faulty_lockstep.py FOLDER train c.yaml ...`.

Workers are forked from this process, and so have its changes: before each phase of a step they look into FOLDER for an
order, a file named KIND-PHASE-NUMBER. The first process that finds one of its phase takes it, and kills or stops itself, or hangs.
"""

import os
import pathlib
import signal
import sys
import threading
import time

from lockstep.checkpoint import writer
from lockstep.cli import _app
from lockstep.core.distributed import collectives, live_group
from lockstep.core.modules import buffers
from lockstep.core.reduction import transport
from lockstep.launch.elastic import live_notes  # noqa: F401 (of the workers)
from lockstep.parallel import micro_batches
from lockstep.parallel.strategies import _ddp
from lockstep.run.tasks import train_live  # noqa: F401 (of the workers)
from lockstep.training import evaluation, loop, state_transfer, step

PHASES = {
    "forward": (micro_batches.MicroBatches, "outputs"),
    "exchange": (transport.NetworkTransport, "sum"),
    "shared-memory": (transport.SharedMemoryTransport, "sum"),
    "buffers": (buffers.BufferUpdates, "end_step"),
    "optimizer": (step, "update"),
    "agreement": (collectives.Agreement, "read"),
    "after-step": (loop, "_settle"),
    "evaluation": (evaluation, "_evaluate_round"),
    "save": (writer.Writer, "start"),
    "writing": (writer.Writer, "_write"),
    "renaming": (writer, "_publish"),
    "rendezvous": (live_group.LiveGroup, "_wait_for_formation"),
    "connecting": (live_group.LiveGroup, "_open"),
    "sending": (state_transfer, "_send"),
    "receiving": (state_transfer, "_receive"),
    "placing": (_ddp.DataParallel, "place"),
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}
HANG = "hang"


def meet(folder, phase):
    for name in os.listdir(folder):
        kind, _, rest = name.partition("-")
        if kind in {*SIGNALS, HANG} and rest.rpartition("-")[0] == phase:
            try:
                os.rename(folder / name, folder / f"taken-{name}")
            except OSError:
                continue
            if kind == HANG:
                time.sleep(1000)
            os.kill(os.getpid(), SIGNALS[kind])


def install(folder):
    for phase, (owner, name) in PHASES.items():
        original = getattr(owner, name)

        def faulty(*args, phase=phase, original=original, **kwargs):
            meet(folder, phase)
            return original(*args, **kwargs)

        setattr(owner, name, faulty)


if __name__ == "__main__":
    install(pathlib.Path(sys.argv[1]).resolve())
    assert threading.active_count() == 1
    _app.app(sys.argv[2:])
