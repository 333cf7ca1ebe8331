"""The pool of worker processes: each gets its next chunk when it has finished one, or the chunk of one that died."""

import multiprocessing
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from lockstep.base import ctrl_c
from lockstep.base.errors import LaunchError, ModelError, PeerLost
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.predict.chunk_worker import (
    ChunkDone,
    ChunkRequest,
    ChunkTask,
    Message,
    PromptsCut,
    WorkerError,
    explanation,
    open_table,
    run_worker,
)

PRELOADED = ["lockstep.base.orphaned_start", "lockstep.inference.predict.chunk_worker"]
PRELOADED_FOR_TEXTS = ["transformers.modeling_utils", "transformers.models.auto.tokenization_auto"]
"""Imported once, by the fork server where there is one, instead of for 10 s in each process."""
MAX_DEATHS = 3
"""Number of processes that die over one chunk, or before their first, and end the command."""
EXIT_SECONDS = 5.0
"""Time for a process to exit when all chunks are done."""


@dataclass(kw_only=True, eq=False)
class Worker:
    process: Any
    pipe: Connection
    is_open: bool = False
    """Whether it has loaded the model."""
    request: ChunkRequest | None = None
    rows: int = 0
    """Number of rows predicted of its current chunk."""


@dataclass(kw_only=True)
class WorkerPool:
    """A pool of at most `size` processes."""

    task: ChunkTask
    size: int
    report: Callable[[str], None]
    """Called with messages for the user."""

    def __post_init__(self) -> None:
        self.workers: list[Worker] = []
        self.facts: ExportFacts | None = None
        self.orphaned: deque[ChunkRequest] = deque()
        """Chunks of workers that died."""
        self.deaths: Counter[str] = Counter()
        self.cut_prompts = 0
        can_fork = "forkserver" in multiprocessing.get_all_start_methods() and self.task.device.type == "cpu"
        self.context: Any = multiprocessing.get_context("forkserver" if can_fork else "spawn")
        self.context.set_forkserver_preload([*PRELOADED, *(PRELOADED_FOR_TEXTS if self.task.files is None else [])])

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Let all workers exit; kill them after an error."""
        for worker in self.workers:
            if kind is None:
                with suppress(ConnectionError):
                    worker.pipe.send(None)
                worker.process.join(EXIT_SECONDS)
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.pipe.close()

    def start_worker(self) -> None:
        """Start a worker. Raises LaunchError."""
        ours, theirs = self.context.Pipe()
        task = self.task
        if task.device.type == "cuda":
            task = replace(task, device=torch.device("cuda", len(self.workers) % torch.cuda.device_count()))
        process = self.context.Process(target=run_worker, args=(task, theirs), daemon=True)
        try:
            with _script_unread():
                ctrl_c.start(process, self.context)
        except OSError as error:
            raise LaunchError(f"cannot start a process that predicts: {error.strerror}") from None
        finally:
            theirs.close()
        self.workers.append(Worker(process=process, pipe=ours))

    def model_facts(self) -> ExportFacts:
        """Wait until the first worker has loaded the model -> its facts."""
        while self.facts is None:
            for _ in self._receive():
                pass
        return self.facts

    def predict(self, requests: Iterator[ChunkRequest], count: int, report_rows: Callable[[int], object]) -> None:
        """Predict `count` chunks; reports numbers of predicted rows, negative for those lost with a worker."""
        for _ in range(len(self.workers), min(self.size, count)):
            self.start_worker()
        done = 0
        while done < count:
            for worker in self.workers:
                if worker.is_open and worker.request is None:
                    self._send_next(worker, requests)
            for message in self._receive():
                if isinstance(message, int):
                    report_rows(message)
                done += isinstance(message, ChunkDone)

    def _send_next(self, worker: Worker, requests: Iterator[ChunkRequest]) -> None:
        request = self.orphaned.popleft() if self.orphaned else next(requests, None)
        if request is not None:
            worker.request, worker.rows = request, 0
            with suppress(ConnectionError):  # it has died, which _receive notices
                worker.pipe.send(request)

    def _receive(self) -> Iterator[Message]:
        """Wait for at least one message, or the end of a worker."""
        by_pipe = {worker.pipe: worker for worker in self.workers}
        for pipe in wait(list(by_pipe)):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                message: Message = worker.pipe.recv()
            except (EOFError, OSError):
                yield from self._replace(worker)
            else:
                self._handle(worker, message)
                yield message

    def _handle(self, worker: Worker, message: Message) -> None:
        if isinstance(message, WorkerError):
            raise message.kind(message.message)
        if isinstance(message, ExportFacts):
            if self.facts not in (None, message):
                raise ModelError("the model was changed while it was opened: give the same command again")
            self.facts, worker.is_open = message, True
        elif isinstance(message, PromptsCut):
            self.cut_prompts += message.count
        elif isinstance(message, ChunkDone):
            worker.request = None
        else:
            worker.rows += message

    def _replace(self, worker: Worker) -> Iterator[int]:
        """Start another worker for one that died, and requeue its chunk. Raises PeerLost after MAX_DEATHS."""
        worker.process.join()
        worker.pipe.close()
        self.workers.remove(worker)
        code, request = worker.process.exitcode, worker.request
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        key = request.file_name if request else ""
        self.deaths[key] += 1
        if self.deaths[key] == MAX_DEATHS:
            where = f"in the rows from {request.first_row} on" if request else "before it had any"
            raise PeerLost(
                f"a process {end} {where}, the {MAX_DEATHS}rd in that place: if it ran out of memory, give fewer "
                "--processes or a smaller --batch"
            )
        self.report(f"a process {end}: another one takes its place")
        if request:
            self.orphaned.append(request)
            yield -worker.rows
        self.start_worker()


@dataclass(kw_only=True)
class CommandProcess(WorkerPool):
    """A pool without workers, for a single chunk: it is predicted in this process sooner than another one starts."""

    def start_worker(self) -> None:
        """Start nothing."""

    def model_facts(self) -> ExportFacts:
        """Open the model -> its facts. Raises UserError, SampleError."""
        with self._convert_errors():
            self.table = open_table(self.task, self._receive_own)
        return self.table.model.facts

    def predict(self, requests: Iterator[ChunkRequest], count: int, report_rows: Callable[[int], object]) -> None:
        self.report_rows = report_rows
        for request in requests:
            with self._convert_errors():
                self.table.predict(request)

    def _receive_own(self, message: Message) -> None:
        if isinstance(message, int):
            self.report_rows(message)
        elif isinstance(message, PromptsCut):
            self.cut_prompts += message.count

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise explanation(error, self.task) from error.__cause__


@contextmanager
def _script_unread() -> Iterator[None]:
    """Keep multiprocessing from importing `__main__` in processes that are started meanwhile: they do not need it, and
    it may lack an `if __name__` guard, take long, or be no file ("<stdin>")."""
    names = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: names[name] for name in ("__file__", "__spec__") if name in names}
    names |= {"__file__": None, "__spec__": None}
    try:
        yield
    finally:
        del names["__file__"], names["__spec__"]
        names |= before
