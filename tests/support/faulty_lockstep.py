"""`lockstep`, whose training processes meet faults: `warm.run(["faulty_lockstep", FOLDER, "train", "c.yaml", ...])`.

Workers are forked from this process, and so have its changes: before each phase of a step they look into FOLDER for an
order, a file named KIND-PHASE-NUMBER. The first process that finds one of its phase takes it, and kills or stops itself, hangs, or
fails after the phase as if a connection were lost.
"""

import os
import pathlib
import signal
import threading
import time

from lockstep.checkpoint import writer
from lockstep.cli import _app
from lockstep.core.distributed import collectives, live_group
from lockstep.core.modules import buffers
from lockstep.core.numerics import precision
from lockstep.core.reduction import gradient_norm, reduce_scatter, transport
from lockstep.parallel import fsdp_units, micro_batches
from lockstep.parallel.strategies import _ddp, _fsdp
from lockstep.protocol import live_messages  # noqa: F401 (of the workers)
from lockstep.run.tasks import train_live
from lockstep.training import evaluation, loop, state_transfer, step

PHASES = {
    "forward": (micro_batches.MicroBatches, "outputs"),
    "exchange": (transport.NetworkTransport, "sum"),
    "shared-memory": (transport.SharedMemoryTransport, "sum"),
    "buffers": (buffers.BufferUpdates, "end_step"),
    "optimizer": (step, "update"),
    "unscaling": (precision.Scaler, "unscale_"),
    "gather": (fsdp_units.AllGather, "__call__"),
    "scatter": (reduce_scatter.TreeReduceScatter, "__call__"),
    "norm": (gradient_norm.ShardedNorm, "global_norm"),
    "ready": (train_live, "confirm_on_all_ranks"),
    "applying": (step, "_apply"),
    "agreement": (collectives.Agreement, "read"),
    "after-step": (loop, "_settle"),
    "evaluation": (evaluation, "_evaluate_rounds"),
    "save": (writer.Writer, "start"),
    "writing": (writer.Writer, "_write"),
    "renaming": (writer.Writer, "_publish"),
    "rendezvous": (live_group.LiveGroup, "_wait_for_formation"),
    "connecting": (live_group.LiveGroup, "_open"),
    "sending": (state_transfer, "_send"),
    "receiving": (state_transfer, "_receive"),
    "placing": (_ddp.DataParallel, "place"),
    "assigned": (live_group.LiveGroup, "open_alone"),
    "placing-again": (_fsdp.FullyShardedDataParallel, "_place_again"),
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}
HANG, FAIL = "hang", "fail"
DAWDLE, DAWDLE_SECONDS = "dawdle", 0.1
"""A file in FOLDER, and for how long each step waits while it is there."""


def meet(folder, phase):
    if phase == "after-step" and (folder / DAWDLE).exists():
        time.sleep(DAWDLE_SECONDS)
    for name in os.listdir(folder):
        kind, _, rest = name.partition("-")
        if kind in {*SIGNALS, HANG, FAIL} and rest.rpartition("-")[0] == phase:
            try:
                os.rename(folder / name, folder / f"taken-{name}")
            except OSError:
                continue
            if kind == HANG:
                time.sleep(1000)
            if kind == FAIL:
                return FAIL
            os.kill(os.getpid(), SIGNALS[kind])
    return None


def install(folder):
    for phase, (owner, name) in PHASES.items():
        original = getattr(owner, name)

        def faulty(*args, phase=phase, original=original, **kwargs):
            kind, result = meet(folder, phase), original(*args, **kwargs)
            if kind == FAIL:
                raise RuntimeError("Connection closed by peer")
            return result

        setattr(owner, name, faulty)


def run(words):
    folder, *rest = words
    install(pathlib.Path(folder).resolve())
    assert threading.active_count() == 1
    _app.app(rest)
