"""Warm processes that are started once, and joined into process groups as tests ask for them."""

import gc
import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
import warm

from lockstep.base import trust

TIMEOUT_SECONDS = 240
MOST_THREADS = 40
"""Threads of a process before it is replaced: those of Gloo's groups outlive some tests, and each wakes up 100 times a
second, which took a third of the machine."""
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(list(warm.PRELOADED))
"""Of ranks: each begins with what it would import."""


def _serve(pipe):
    """A worker process: run whatever function is sent, inside a process group of the asked size."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    trust.accept([trust.OPTION])  # as a launcher passes on to its ranks
    while True:
        try:
            rank, world, store, function, args = pipe.recv()
        except EOFError:  # the tests have ended, one way or another
            return
        gc.freeze()  # what was imported so far: collections need not look through it again
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
            dist.barrier()  # or a rank that has little to do would leave while others still connect to it
            result = True, function(*args)
        except BaseException:
            result = False, traceback.format_exc()
        finally:
            gc.collect()  # what C++ frees a group for later holds the GIL, for which a thread of the group may wait
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
        # By value: tensors that are shared need a socket in the folder for temporary files, whose path may be too long.
        pipe.send_bytes(pickle.dumps(result))


def _threads(pid):
    with suppress(psutil.Error):
        return psutil.Process(pid).num_threads()
    return 0


class Ranks:
    """`ranks(world, function, *args)` runs a top-level function on each of `world` processes -> results by rank."""

    def __init__(self):
        self.workers = []

    def __call__(self, world, function, *args):
        if any(_threads(pid) > MOST_THREADS for pid in self.pids()):
            self.close()
        while len(self.workers) < world:
            ours, theirs = FORKING.Pipe()
            process = FORKING.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        try:
            return self._called(world, function, args)
        except BaseException:
            self.close()  # a rank that failed, or has not answered yet, is of no use for the next test
            raise

    def _called(self, world, function, args):
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world):
                self.workers[rank][1].send((rank, world, f"{folder}/store", function, args))
            results = []
            for rank in range(world):
                if not self.workers[rank][1].poll(TIMEOUT_SECONDS):
                    pytest.fail(f"rank {rank} of {world} did not answer within {TIMEOUT_SECONDS} s")
                results.append(pickle.loads(self.workers[rank][1].recv_bytes()))
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(results) if not good]
        assert not failed, "\n".join(failed)
        return [value for _, value in results]

    def pids(self):
        return {process.pid for process, _ in self.workers}

    def close(self):
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers = []
