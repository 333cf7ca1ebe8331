"""Runs a function in a process of its own, with limits, where input from others decides how long it takes."""

import gc
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from math import ceil
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

from lockstep.base.errors import DataError

MOST_BYTES = 512 << 20
"""Limit of the memory beyond what the process had when it was forked."""


def limited(work: Callable[[], Any], what: str, *, seconds: float) -> Any:
    """Return what `work` returns, as JSON carries it; without limits where no process can be forked. Raises DataError
    where it takes too long, or too much memory, and for what it raises itself; `what` is its subject."""
    if not hasattr(os, "fork"):
        return work()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        _run(work, sender, seconds)
    sender.close()
    try:
        done = receiver.poll(seconds)
        outcome = json.loads(receiver.recv_bytes()) if done else {}
    except EOFError:  # killed
        outcome = {}
    finally:
        receiver.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if "result" in outcome:
        return outcome["result"]
    too_much = f"{what} takes more than {seconds:g} s, or {MOST_BYTES >> 20} MB: it may have no end"
    raise DataError(outcome.get("error") or too_much)


def _run(work: Callable[[], Any], sender: Connection, seconds: float) -> NoReturn:
    """Run `work` in the forked process, and send its outcome."""
    import resource  # noqa: PLC0415 (not on Windows)

    try:
        gc.disable()  # it would copy the parent's memory
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # the parent's handlers would write into its pipes
        memory, cpu = psutil.Process().memory_info().vms + MOST_BYTES, ceil(seconds) + 1
        if sys.platform == "linux":  # elsewhere it is not kept to, or refused
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))  # where the parent has been killed
        outcome = {"result": work()}
    except MemoryError:
        outcome = {}
    except BaseException as error:
        outcome = {"error": str(error) or type(error).__name__}
    try:
        sender.send_bytes(json.dumps(outcome).encode())
    finally:
        os._exit(0)
