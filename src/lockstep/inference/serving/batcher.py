"""Batches many requests, outside of the event loop: inputs by length, each predicted once, in several threads; and
completions, which get one token each per step, in one thread.

A completion joins the others at their next token, and leaves when it ends.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from lockstep.inference.generation.generator import Completion, GeneratedBatch, Generator
from lockstep.inference.predictor import Predictor, Sample

PASS_TOKENS = 128
"""Cost of a forward pass, in tokens of padding: beyond that, shorter texts get a forward pass of their own."""
Waiting = TypeVar("Waiting")


class Full(Exception):
    """The queue is full."""


class Queue(Generic[Waiting]):
    """Inputs or completions that wait for a thread."""

    def __init__(
        self, *, max_batch: int, capacity: int, on_batch: Callable[[int, float], None] = lambda size, seconds: None
    ) -> None:
        """`on_batch` is called with the size and the seconds of every batch, in a thread of the batcher."""
        self.max_batch, self.capacity, self.on_batch = max_batch, capacity, on_batch
        self._waiting: deque[Waiting] = deque()
        self._is_closing = False

    @property
    def depth(self) -> int:
        return len(self._waiting)

    def _admit(self, given: Sequence[Waiting]) -> None:
        """Queue all of them, under the lock. Raises Full, without queueing any."""
        if self._is_closing or len(self._waiting) + len(given) > self.capacity:
            raise Full
        self._waiting.extend(given)


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    predictor: Predictor
    """Model that it was encoded for; a reload may replace it meanwhile."""
    sample: Sample
    answer: "asyncio.Future[np.ndarray]"
    """Scores float32 [K] or [W, K]; cancelled if the request is."""
    arrived: float = field(default_factory=time.monotonic)

    @property
    def length(self) -> int:
        """Length in tokens; 1 for images, which have equal sizes."""
        return len(self.sample) if self.sample.ndim == 1 else 1


class Batcher(Queue[Item]):
    """Predicts waiting inputs, oldest first, as soon as a thread is free."""

    def __init__(self, *, max_wait_seconds: float, workers: int = 1, **more: Any) -> None:
        super().__init__(**more)
        self.max_wait_seconds, self.workers = max_wait_seconds, workers
        self._cores, self._running = torch.get_num_threads(), 0
        self._lock = threading.Lock()
        self._conditions = [threading.Condition(self._lock) for _ in range(workers)]
        self._idle: set[int] = set()
        """Numbers of the idle threads. The lowest is woken first, so that single requests get the same one."""
        self._threads = ThreadPoolExecutor(workers, "lockstep-batcher")
        for number in range(workers):
            self._threads.submit(self._run, number)

    async def predict(self, predictor: Predictor, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return the scores of encoded samples, float32 [K] or [W, K], in their order. Raises Full, without queueing
        any. Cancelling it removes its inputs from the queue."""
        loop = asyncio.get_running_loop()
        items = [Item(predictor=predictor, sample=sample, answer=loop.create_future()) for sample in samples]
        with self._lock:
            self._admit(items)
            self._wake()
        try:
            return [await item.answer for item in items]
        except BaseException:
            for item in items:
                item.answer.cancel()
            with self._lock:
                self._waiting = deque(item for item in self._waiting if not item.answer.cancelled())
            raise

    def close(self) -> None:
        """Answer what is queued, accept nothing more, and end the threads."""
        with self._lock:
            self._is_closing = True
            while self._idle:
                self._wake()
        self._threads.shutdown()

    # ---- in the threads

    def _run(self, number: int) -> None:
        threads = 0
        while items := self._take(number):
            if (needed := self._threads_for(number)) != threads:  # setting it empties caches of torch
                torch.set_num_threads(threads := needed)  # for this thread alone
            self._answer_all(items)
            del items  # an idle thread would keep a replaced model alive
            with self._lock:
                self._running -= 1

    def _answer_all(self, items: list[Item]) -> None:
        for group in groups(items):
            self._answer([item for item in group if not item.answer.cancelled()])

    def _threads_for(self, number: int) -> int:
        """Return the cores for this thread's operations: one under load, which has the higher throughput; all for a
        single request, which has the lower latency.

        Only the first thread gets all: OpenMP keeps a pool for each thread that ever used several cores, and none of
        them spins between operations once there are more pool threads than cores.
        """
        if self.workers == 1:
            return self._cores
        return 1 if self._waiting else max(1, self._cores // max(self._running, 1 if number == 0 else 2))

    def _take(self, number: int) -> list[Item]:
        """Wait for inputs -> the oldest ones; none after `close`."""
        with self._lock:
            while (seconds := self._seconds_to_wait()) != 0:
                self._idle.add(number)
                self._conditions[number].wait(seconds)
                self._idle.discard(number)
            items = [self._waiting.popleft() for _ in range(self._share())]
            self._running += bool(items)
            if self._waiting:
                self._wake()
            return items

    def _seconds_to_wait(self) -> float | None:
        """Return the time until the queued inputs are due; None if there are none."""
        if self._is_closing or len(self._waiting) >= self.max_batch:
            return 0
        if not self._waiting:
            return None
        return max(0.0, self._waiting[0].arrived + self.max_wait_seconds - time.monotonic())

    def _wake(self) -> None:
        if self._idle:
            self._idle.remove(number := min(self._idle))
            self._conditions[number].notify()

    def _share(self) -> int:
        """Return the number of inputs to take: the queue is divided among the free threads."""
        free = max(1, self.workers - self._running)
        return min(self.max_batch, -(-len(self._waiting) // free))

    def _answer(self, group: list[Item]) -> None:
        """Predict together; after an error one by one, so that only the faulty input fails."""
        if not group:
            return
        began = time.monotonic()
        try:
            scores = group[0].predictor.scores([item.sample for item in group])
        except Exception as error:  # raised in the request
            if len(group) == 1:
                _resolve(group, error)
            else:
                for item in group:
                    self._answer([item])
            return
        self.on_batch(len(group), time.monotonic() - began)
        _resolve(group, scores)


def groups(items: list[Item]) -> list[list[Item]]:
    """Group inputs of one model whose padding costs less than another forward pass, longest first."""
    made: list[list[Item]] = []
    for model in dict.fromkeys(item.predictor for item in items):
        ordered = sorted((item for item in items if item.predictor is model), key=lambda item: -item.length)
        group = [ordered[0]]
        for number, item in enumerate(ordered[1:], 1):
            if (group[0].length - item.length) * (len(ordered) - number) > PASS_TOKENS:
                made.append(group)
                group = []
            group.append(item)
        made.append(group)
    return made


def _resolve(group: list[Item], answers: np.ndarray | Exception) -> None:
    """Set the futures, in one callback of their event loop."""
    loop = group[0].answer.get_loop()

    def settle() -> None:
        for number, item in enumerate(group):
            if item.answer.done():
                continue
            if isinstance(answers, Exception):
                item.answer.set_exception(answers)
            else:
                item.answer.set_result(answers[number])

    loop.call_soon_threadsafe(settle)


@dataclass(eq=False)
class Job:
    """A completion that a request waits for."""

    generator: Generator
    """Model that its prompt was encoded for; a reload may replace it meanwhile."""
    completion: Completion
    notify: Callable[[str | Exception], None]
    """Called in the thread: with new text, at the end with an empty text, or with an error."""
    told: int = 0
    """Number of characters passed to `notify`."""
    is_cancelled: bool = False


class GenerationBatcher(Queue[Job]):
    """Generates in one thread for any number of requests: each step of a model uses all cores."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._running: dict[Completion, Job] = {}
        self._batches: dict[Generator, GeneratedBatch] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lockstep-generate", daemon=True)
        self._thread.start()

    async def pieces(
        self, generator: Generator, completions: Sequence[Completion], *, seconds: float | None = None
    ) -> AsyncGenerator[tuple[int, str]]:
        """Yield the generated texts as they come, piece by piece, each with the number of its completion. Raises Full,
        TimeoutError when it takes longer than `seconds`, and the first error. Ending the iteration cancels them all."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str | Exception]]()

        def notify(number: int, piece: str | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended, and its requests
                loop.call_soon_threadsafe(arrived.put_nowait, (number, piece))

        jobs = [Job(generator, each, partial(notify, number)) for number, each in enumerate(completions)]
        with self._changed:
            self._admit(jobs)
            self._changed.notify()
        end, remaining = seconds and loop.time() + seconds, len(jobs)
        try:
            while remaining:
                async with asyncio.timeout_at(end):
                    number, piece = await arrived.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece:
                    yield number, piece
                remaining -= not piece
        finally:
            for job in jobs:
                job.is_cancelled = True

    def close(self) -> None:
        """Finish what has been accepted, accept nothing more, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    # ---- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._running and not self._is_closing:
                    self._changed.wait()
                if self._is_closing and not self._waiting and not self._running:
                    return
                free = min(self.max_batch - len(self._running), len(self._waiting))
                joining = [self._waiting.popleft() for _ in range(free)]
            self._drop_cancelled()
            self._join([job for job in joining if not job.is_cancelled])
            for batch in [*self._batches.values()]:
                self._step(batch)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._running.values() if job.is_cancelled]:
            del self._running[job.completion]
            self._batches[job.generator].drop([job.completion])

    def _join(self, jobs: Sequence[Job]) -> None:
        """Read the prompts of new jobs together; after an error one by one, so that only the faulty one fails."""
        for model in dict.fromkeys(job.generator for job in jobs):
            own = [job for job in jobs if job.generator is model]
            batch = self._batches.setdefault(model, GeneratedBatch(model))
            try:
                batch.join([job.completion for job in own])
            except Exception as error:  # raised in the request
                if len(own) == 1:
                    own[0].notify(error)
                else:
                    for job in own:
                        self._join([job])
                continue
            self._running |= {job.completion: job for job in own}

    def _step(self, batch: GeneratedBatch) -> None:
        rows, began = [*batch.rows], time.monotonic()
        try:
            if rows:
                batch.step()
                self.on_batch(len(rows), time.monotonic() - began)
            for row in rows:
                self._notify(self._running[row])
        except Exception as error:  # raised in the requests
            batch.rows = []
            for row in rows:
                if job := self._running.pop(row, None):
                    job.notify(error)
        if not batch.rows:  # an idle thread would keep a replaced model alive
            del self._batches[batch.generator]

    def _notify(self, job: Job) -> None:
        row = job.completion
        if len(row.text) > job.told:
            job.notify(row.text[job.told :])
            job.told = len(row.text)
        if row.finish:
            del self._running[row]
            job.notify("")
