"""Some steps of a training under the PyTorch profiler: a trace file for Perfetto, TensorBoard or chrome://tracing."""

import gzip
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from lockstep.base.model_contracts import MicroBatch
from lockstep.core.distributed.collectives import finish_collectives
from lockstep.core.host import phases

Steps = Iterator[list[MicroBatch]]


def trace_file(folder: Path, rank: int) -> Path:
    return folder / f"trace-rank-{rank}.json.gz"


@contextmanager
def traced(file: Path, *, with_stack: bool) -> Iterator[profile]:
    """Profile a block and write the trace; phases are named in it, on a GPU also as NVTX ranges for Nsight. Collective.
    With `with_stack` each operation has the lines of Python that called it, which takes time and memory."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    stacks = _ExperimentalConfig(verbose=True) if with_stack else None  # else the operators lack them
    profiler = profile(activities=activities, with_stack=with_stack, acc_events=True, experimental_config=stacks)
    with phases.annotated(_annotation), profiler:
        yield profiler
        finish_collectives()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".trace-", dir=file.parent) as staging:  # only this user may write there
        plain, packed = Path(staging) / "trace.json", Path(staging) / "trace.json.gz"
        profiler.export_chrome_trace(str(plain))  # by itself it packs in the shared folder for temporary files
        with plain.open("rb") as source, gzip.open(packed, "wb") as target:
            shutil.copyfileobj(source, target)
        packed.replace(file)


@contextmanager
def _annotation(name: str) -> Iterator[None]:
    on_gpu = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext()
    with torch.profiler.record_function(f"phase: {name}"), on_gpu:
        yield


def tracing(steps: Steps, *, first: int, last: int, done: int, file: Path) -> Steps:
    """Yield the steps; trace those from `first` to `last` (from 1, both included). `done`: steps before them."""
    for number, micro_batches in enumerate(steps, start=done + 1):
        if number != first:
            yield micro_batches
            continue
        with traced(file, with_stack=False):
            yield micro_batches
            yield from islice(steps, last - first)
