"""Generates the completions of many requests together, one token each per step, in a thread of its own.

A request joins the others at their next token, and leaves when its completion ends.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lockstep.inference.generation.generator import Completion, GeneratedBatch, Generator
from lockstep.inference.serving.batcher import Full


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


class GenerationBatcher:
    """Generates in one thread for any number of requests: each step of a model uses all cores."""

    def __init__(
        self, *, max_batch: int, capacity: int, on_batch: Callable[[int, float], None] = lambda size, seconds: None
    ) -> None:
        """`on_batch` is called in the thread with the number of completions and the seconds of every step."""
        self.max_batch, self.capacity, self.on_batch = max_batch, capacity, on_batch
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        """Jobs by the id of their completions."""
        self._batches: dict[int, GeneratedBatch] = {}
        """Batches by the id of their models."""
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="lockstep-generate", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Number of requests that wait to join."""
        return len(self._waiting)

    async def pieces(
        self, generator: Generator, completion: Completion, *, seconds: float = math.inf
    ) -> AsyncGenerator[str]:
        """Yield the generated text, piece by piece. Raises Full, and TimeoutError when it takes longer than `seconds`.
        Ending the iteration cancels the completion."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[str | Exception]()

        def notify(piece: str | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended, and its requests
                loop.call_soon_threadsafe(arrived.put_nowait, piece)

        job = Job(generator, completion, notify)
        with self._changed:
            if self._is_closing or len(self._waiting) >= self.capacity:
                raise Full
            self._waiting.append(job)
            self._changed.notify()
        end = loop.time() + seconds
        try:
            while True:
                async with asyncio.timeout_at(end if seconds < math.inf else None):
                    piece = await arrived.get()
                if not piece:
                    return
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
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
            del self._running[id(job.completion)]
            self._batches[id(job.generator)].drop([job.completion])

    def _join(self, jobs: Sequence[Job]) -> None:
        """Read the prompts of new jobs together; after an error one by one, so that only the faulty one fails."""
        for model in {id(job.generator): job.generator for job in jobs}.values():
            own = [job for job in jobs if job.generator is model]
            batch = self._batches.setdefault(id(model), model.batch())
            try:
                batch.join([job.completion for job in own])
            except Exception as error:  # raised in the request
                if len(own) == 1:
                    own[0].notify(error)
                else:
                    for job in own:
                        self._join([job])
                continue
            self._running |= {id(job.completion): job for job in own}

    def _step(self, batch: GeneratedBatch) -> None:
        rows, began = [*batch.rows], time.monotonic()
        try:
            if rows:
                batch.step()
                self.on_batch(len(rows), time.monotonic() - began)
            for row in rows:
                self._notify(self._running[id(row)])
        except Exception as error:  # raised in the requests
            batch.rows = []
            for row in rows:
                if job := self._running.pop(id(row), None):
                    job.notify(error)
        if not batch.rows:  # an idle thread would keep a replaced model alive
            self._batches = {key: each for key, each in self._batches.items() if each is not batch}

    def _notify(self, job: Job) -> None:
        row = job.completion
        if len(row.text) > job.told:
            job.notify(row.text[job.told :])
            job.told = len(row.text)
        if row.finish:
            del self._running[id(row)]
            job.notify("")
