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
from lockstep.base.errors import LaunchError, LockstepError, ModelError, PeerLost
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.predict.chunk_worker import ChunkTask, Message, explanation, open_model, run_worker
from lockstep.inference.predict.input_rows import Chunk

PRELOADED = ["lockstep.base.orphaned_start", "lockstep.inference.predict.chunk_worker"]
PRELOADED_FOR_TEXTS = ["transformers.modeling_utils", "transformers.models.auto.tokenization_auto"]
"""Imported once, by the fork server where there is one, instead of for 10 s in each process."""
MAX_DEATHS = 3
"""Number of processes that die over one chunk, or before their first, and end the command."""
EXIT_SECONDS = 5.0
"""Time for a process to exit when all chunks are done."""
Request = tuple[Chunk, bytes]
"""A chunk, and its rows as a serialized table."""


@dataclass(eq=False)
class Worker:
    process: Any
    pipe: Connection
    is_open: bool = False
    request: Request | None = None
    rows: int = 0
    """Number of rows predicted of its current chunk."""


class WorkerPool:
    """A pool of at most `size` processes; `report` is called with messages for the user."""

    def __init__(self, task: ChunkTask, size: int, report: Callable[[str], None]) -> None:
        self.task, self.size, self.report = task, size, report
        self.report_rows: Callable[[int], object] = lambda _: None
        """Called with numbers of predicted rows, negative for those lost with a worker."""
        self.workers: list[Worker] = []
        self.facts: ExportFacts | None = None
        self.orphaned: deque[Request] = deque()
        """Chunks of workers that died."""
        self.deaths: Counter[str] = Counter()
        self.missing = self.cut_prompts = 0
        can_fork = "forkserver" in multiprocessing.get_all_start_methods() and task.device.type == "cpu"
        self.context: Any = multiprocessing.get_context("forkserver" if can_fork else "spawn")
        self.context.set_forkserver_preload([*PRELOADED, *([] if task.has_files else PRELOADED_FOR_TEXTS)])

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
        self.workers.append(Worker(process, ours))

    def model_facts(self) -> ExportFacts:
        """Wait until the first worker has loaded the model -> its facts."""
        while self.facts is None:
            self._receive()
        return self.facts

    def predict(self, requests: Iterator[Request], count: int) -> None:
        """Predict `count` chunks."""
        for _ in range(len(self.workers), min(self.size, count)):
            self.start_worker()
        self.missing = count
        while self.missing:
            for worker in self.workers:
                if worker.is_open and worker.request is None:
                    worker.request = self.orphaned.popleft() if self.orphaned else next(requests, None)
                    worker.rows = 0
                    with suppress(ConnectionError):  # it has died, which _receive notices
                        if worker.request is not None:
                            worker.pipe.send(worker.request)
            self._receive()

    def _receive(self) -> None:
        """Wait for at least one message, or the end of a worker. Raises the error of a worker."""
        by_pipe = {worker.pipe: worker for worker in self.workers}
        for pipe in wait(list(by_pipe)):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                message: Message = worker.pipe.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            if isinstance(message, ExportFacts):
                if self.facts not in (None, message):
                    raise ModelError("the model was changed while it was opened: give the same command again")
                self.facts, worker.is_open = message, True
            elif message is None:
                self.missing, worker.request = self.missing - 1, None
            else:
                worker.rows += self._count(message)

    def _count(self, message: Message) -> int:
        """Count and report a message's rows and cut prompts -> the rows. Raises the error that a worker has sent."""
        if isinstance(message, LockstepError):
            raise message
        if not isinstance(message, tuple):
            return 0
        rows, cut = message
        self.cut_prompts += cut
        self.report_rows(rows)
        return rows

    def _replace(self, worker: Worker) -> None:
        """Start another worker for one that died, and requeue its chunk. Raises PeerLost after MAX_DEATHS."""
        worker.process.join()
        worker.pipe.close()
        self.workers.remove(worker)
        code, request = worker.process.exitcode, worker.request
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        key = request[0].file_name if request else ""
        self.deaths[key] += 1
        if self.deaths[key] == MAX_DEATHS:
            where = f"in the rows from {request[0].first_row} on" if request else "before it had any"
            raise PeerLost(
                f"a process {end} {where}, the {MAX_DEATHS}rd in that place: if it ran out of memory, give fewer "
                "--processes or a smaller --batch"
            )
        self.report(f"a process {end}: another one takes its place")
        if request:
            self.orphaned.append(request)
            self.report_rows(-worker.rows)
        self.start_worker()


class CommandProcess(WorkerPool):
    """A pool without workers, for a single chunk: it is predicted in this process sooner than another one starts."""

    def start_worker(self) -> None:
        """Start nothing."""

    def model_facts(self) -> ExportFacts:
        """Open the model -> its facts. Raises UserError, SampleError."""
        with self._explained():
            self.opened = open_model(self.task, self._count)
        return self.opened.model.facts

    def predict(self, requests: Iterator[Request], count: int) -> None:
        for request in requests:
            with self._explained():
                self.opened.predict(*request)

    @contextmanager
    def _explained(self) -> Iterator[None]:
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
