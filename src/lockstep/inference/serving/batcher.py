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
        self._lock = threading.Lock()
        self._calls = [threading.Condition(self._lock) for _ in range(workers)]
        self._asleep: set[int] = set()
        """Numbers of the threads that wait. The lowest is called first, so that lone requests get the same one."""
        self._is_closing = False
        self._threads = ThreadPoolExecutor(workers, "lockstep-batcher")
        for number in range(workers):
            self._threads.submit(self._run, number)

    @property
    def depth(self) -> int:
        return len(self._waiting)

    async def predict(self, predictor: Predictor, samples: Sequence[Sample]) -> np.ndarray:
        """Probabilities float32 [n, classes] of encoded samples, in their order; all of them are taken, or none.

        Raises Full. When it is cancelled, so are the inputs that have not been begun.
        """
        loop = asyncio.get_running_loop()
        items = [Item(predictor=predictor, sample=sample, answer=loop.create_future()) for sample in samples]
        with self._lock:
            if self._is_closing or len(self._waiting) + len(items) > self.capacity:
                raise Full
            self._waiting.extend(items)
            self._wake()
        try:
            return np.stack([await item.answer for item in items])
        except BaseException:
            for item in items:
                item.answer.cancel()
            with self._lock:  # what nobody waits for takes nobody's place
                self._waiting = deque(item for item in self._waiting if not item.answer.cancelled())
            raise

    def close(self) -> None:
        """Answer what waits, take nothing more, and end the threads."""
        with self._lock:
            self._is_closing = True
            while self._asleep:
                self._wake()
        self._threads.shutdown()

    # ---- in the threads

    def _run(self, number: int) -> None:
        threads = 0
        while items := self._take(number):
            if (wanted := self._threads_for(number)) != threads:  # setting it empties caches of torch's
                torch.set_num_threads(threads := wanted)  # of this thread alone
            self._answer_all(items)
            del items  # a thread that sleeps would keep a model alive that has been replaced
            with self._lock:
                self._running -= 1

    def _answer_all(self, items: list[Item]) -> None:
        for group in groups(items):
            self._answer([item for item in group if not item.answer.cancelled()])

    def _threads_for(self, number: int) -> int:
        """Threads with a core each predict more than one with all cores, which is faster for a lone request.

        Only the first gets all: OpenMP keeps the helpers of each that ever had some, and lets none of them stay awake
        between two operations once there are more of them than cores.
        """
        if self.workers == 1:
            return self._cores
        return 1 if self._waiting else max(1, self._cores // max(self._running, 1 if number == 0 else 2))

    def _take(self, number: int) -> list[Item]:
        """The oldest of those that wait, once there are any; nothing at the end."""
        with self._lock:
            while (seconds := self._patience()) != 0:
                self._asleep.add(number)
                self._calls[number].wait(seconds)
                self._asleep.discard(number)
            items = [self._waiting.popleft() for _ in range(self._share())]
            self._running += bool(items)
            if self._waiting:
                self._wake()
            return items

    def _patience(self) -> float | None:
        """Seconds until what waits is to be taken; None: until something comes."""
        if self._is_closing or len(self._waiting) >= self.max_batch:
            return 0
        if not self._waiting:
            return None
        return max(0.0, self._waiting[0].arrived + self.max_wait_seconds - time.monotonic())

    def _wake(self) -> None:
        if self._asleep:
            self._asleep.remove(number := min(self._asleep))
            self._calls[number].notify()

    def _share(self) -> int:
        """How many to take: what waits is dealt out to the threads that are free."""
        free = max(1, self.workers - self._running)
        return min(self.max_batch, -(-len(self._waiting) // free))

    def _answer(self, group: list[Item]) -> None:
        """Predict them together; should that fail, one by one, so that none pays for another."""
        if not group:
            return
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
