"""Inputs of many requests become batches, by length, in threads of their own, outside of the event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from lockstep.inference.predictor import Predictor, Sample

PASS_TOKENS = 128
"""What one more forward pass costs, in tokens of padding: above that, texts of other length get a pass of their own."""


class Full(Exception):
    """There is no room for more inputs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """One input that waits for its answer."""

    predictor: Predictor
    """The model that it was encoded for, which may be replaced meanwhile."""
    sample: Sample
    answer: "asyncio.Future[np.ndarray]"
    """Probabilities float32 [classes]; cancelled once nobody waits for it any more."""
    arrived: float = field(default_factory=time.monotonic)

    @property
    def length(self) -> int:
        """Tokens; all images of a model are alike."""
        return len(self.sample) if self.sample.ndim == 1 else 1


class Batcher:
    """Takes what waits, as soon as the model is free, oldest first; answers arrive in the loop that asked."""

    def __init__(
        self,
        *,
        max_batch: int,
        max_wait_seconds: float,
        capacity: int,
        workers: int = 1,
        ran: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        """`ran` is told the size and the seconds of every batch, in a thread of the batcher."""
        self.max_batch, self.max_wait_seconds, self.capacity, self.ran = max_batch, max_wait_seconds, capacity, ran
        self.workers = workers
        self._cores, self._running = torch.get_num_threads(), 0
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._threads = ThreadPoolExecutor(workers, "lockstep-batcher")
        for _ in range(workers):
            self._threads.submit(self._run)

    @property
    def depth(self) -> int:
        """Inputs that wait."""
        return len(self._waiting)

    async def predict(self, predictor: Predictor, samples: Sequence[Sample]) -> np.ndarray:
        """Probabilities float32 [n, classes] of encoded samples, in their order; all of them are taken, or none.

        Raises Full. When it is cancelled, so are the inputs that have not been begun.
        """
        loop = asyncio.get_running_loop()
        items = [Item(predictor=predictor, sample=sample, answer=loop.create_future()) for sample in samples]
        with self._changed:
            if self._is_closing or len(self._waiting) + len(items) > self.capacity:
                raise Full
            self._waiting.extend(items)
            self._changed.notify()
        try:
            return np.stack([await item.answer for item in items])
        finally:
            for item in items:
                item.answer.cancel()

    def close(self) -> None:
        """Answer what waits, take nothing more, and end the threads."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._threads.shutdown()

    # ---- in the threads

    def _run(self) -> None:
        while items := self._take():
            # threads with a core each predict more than one with all cores, which is faster for a lone request
            torch.set_num_threads(self._cores if self._running == 1 and not self._waiting else 1)  # this thread's own
            for group in groups([item for item in items if not item.answer.cancelled()]):
                self._answer(group)
            with self._changed:
                self._running -= 1

    def _take(self) -> list[Item]:
        """The oldest of those that wait, once there are any; nothing at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if self._waiting and self.max_wait_seconds:
                    left = self._waiting[0].arrived + self.max_wait_seconds - time.monotonic()
                    self._changed.wait_for(self._is_enough, max(left, 0))
                if self._waiting:
                    break
                if self._is_closing:
                    return []
            items = [self._waiting.popleft() for _ in range(self._share())]
            self._running += 1
            if self._waiting:
                self._changed.notify()
            return items

    def _is_enough(self) -> bool:
        return len(self._waiting) >= self.max_batch or self._is_closing

    def _share(self) -> int:
        """How many to take: what waits is dealt out to the threads that are free."""
        free = max(1, self.workers - self._running)
        return min(self.max_batch, -(-len(self._waiting) // free))

    def _answer(self, group: list[Item]) -> None:
        """Predict them together; should that fail, one by one, so that none pays for another."""
        began = time.monotonic()
        try:
            found = group[0].predictor.probabilities([item.sample for item in group])
        except Exception as error:  # it belongs to the one that asked
            if len(group) > 1:
                for item in group:
                    self._answer([item])
                return
            _tell(group, error)
            return
        self.ran(len(group), time.monotonic() - began)
        _tell(group, found)


def groups(items: list[Item]) -> list[list[Item]]:
    """Parts of what is to be predicted whose padding costs less than another pass would, longest first."""
    found: list[list[Item]] = []
    for _, alike in groupby(sorted(items, key=lambda item: id(item.predictor)), key=lambda item: id(item.predictor)):
        ordered = sorted(alike, key=lambda item: -item.length)
        group = [ordered[0]]
        for number, item in enumerate(ordered[1:], 1):
            if (group[0].length - item.length) * (len(ordered) - number) > PASS_TOKENS:
                found.append(group)
                group = []
            group.append(item)
        found.append(group)
    return found


def _tell(group: list[Item], answers: np.ndarray | Exception) -> None:
    """Bring answers into the event loop, in one go."""
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
