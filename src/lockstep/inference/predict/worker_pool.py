"""The processes that predict: each gets a chunk when it has done its last, or the chunk of one that has died."""

import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from lockstep.base import ctrl_c
from lockstep.base.errors import LaunchError, ModelError, PeerLost
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.predict.chunk_worker import ChunkTask, Done, Failed, Message, Work, work
from lockstep.launch.launchers._spawn import script_unread

PRELOADED = ["lockstep.inference.predict.chunk_worker"]
PRELOADED_FOR_TEXTS = ["transformers.modeling_utils", "transformers.models.auto.tokenization_auto"]
"""What every process needs: imported once, by the process from which the system copies them (where it can), instead of
for 10 s in each of them."""
TRIES = 3
"""So many processes may die over one chunk, or before their first, until it is no accident."""
GRACE_SECONDS = 5.0
"""For a process to end by itself when all is done."""


@dataclass(kw_only=True, eq=False)
class Worker:
    process: Any
    pipe: Connection
    is_open: bool = False
    """Whether it has its model."""
    work: Work | None = None
    rows: int = 0
    """Rows of its chunk that it has predicted."""


@dataclass(kw_only=True)
class WorkerPool:
    """As many of them as there are chunks for, up to `size`."""

    task: ChunkTask
    size: int
    tell: Callable[[str], None]
    """Takes what a person should know."""

    def __post_init__(self) -> None:
        self.hands: list[Worker] = []
        self.facts: ExportFacts | None = None
        self.left_over: deque[Work] = deque()
        self.deaths: Counter[str] = Counter()
        can_copy = "forkserver" in multiprocessing.get_all_start_methods() and self.task.device.type == "cpu"
        self.context: Any = multiprocessing.get_context("forkserver" if can_copy else "spawn")
        more = PRELOADED_FOR_TEXTS if self.task.images is None else []
        self.context.set_forkserver_preload([*PRELOADED, *more])

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """End all of them: by themselves where all is done, else at once."""
        for hand in self.hands:
            if kind is None:
                with suppress(ConnectionError):
                    hand.pipe.send(None)
                hand.process.join(GRACE_SECONDS)
            hand.process.kill()
        for hand in self.hands:
            hand.process.join()
            hand.pipe.close()

    def hire(self) -> None:
        """Start one more. Raises LaunchError."""
        ours, theirs = self.context.Pipe()
        task = self.task
        if task.device.type == "cuda":
            task = replace(task, device=torch.device("cuda", len(self.hands) % torch.cuda.device_count()))
        process = self.context.Process(target=work, args=(task, theirs), daemon=True)
        try:
            with script_unread():
                ctrl_c.start(process, self.context)
        except OSError as error:
            raise LaunchError(f"cannot start a process that predicts: {error.strerror}") from None
        finally:
            theirs.close()
        self.hands.append(Worker(process=process, pipe=ours))

    def opened(self) -> ExportFacts:
        """Wait for the first to have its model -> the facts of it."""
        while self.facts is None:
            for _ in self._heard():
                pass
        return self.facts

    def predict(self, todo: Iterator[Work], count: int) -> Iterator[int]:
        """Have `count` chunks done; yields how many rows are predicted, negative where it was for nothing."""
        for _ in range(len(self.hands), min(self.size, count)):
            self.hire()
        done = 0
        while done < count:
            for hand in [hand for hand in self.hands if hand.is_open and hand.work is None]:
                self._give(hand, todo)
            for message in self._heard():
                if isinstance(message, int):
                    yield message
                done += isinstance(message, Done)

    def _give(self, hand: Worker, todo: Iterator[Work]) -> None:
        order = self.left_over.popleft() if self.left_over else next(todo, None)
        if order is not None:
            hand.work, hand.rows = order, 0
            with suppress(ConnectionError):  # it has died: to be heard of
                hand.pipe.send(order)

    def _heard(self) -> Iterator[Message]:
        """What has been said since, at least by one of them."""
        by_pipe = {hand.pipe: hand for hand in self.hands}
        for pipe in wait(list(by_pipe)):
            hand = by_pipe[pipe]  # type: ignore[index]
            try:
                message: Message = hand.pipe.recv()
            except (EOFError, OSError):
                yield from self._lost(hand)
            else:
                self._noticed(hand, message)
                yield message

    def _noticed(self, hand: Worker, message: Message) -> None:
        if isinstance(message, Failed):
            raise message.kind(message.text)
        if isinstance(message, ExportFacts):
            if self.facts not in (None, message):
                raise ModelError("the model was changed while it was opened: give the same command again")
            self.facts, hand.is_open = message, True
        elif isinstance(message, Done):
            hand.work = None
        else:
            hand.rows += message

    def _lost(self, hand: Worker) -> Iterator[int]:
        """Another takes the place and the chunk of one that has died. Raises PeerLost if it happens again and again."""
        hand.process.join()
        hand.pipe.close()
        self.hands.remove(hand)
        code = hand.process.exitcode
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        key = hand.work.part if hand.work else ""
        self.deaths[key] += 1
        if self.deaths[key] == TRIES:
            where = f"in the rows from {hand.work.first_row} on" if hand.work else "before it had any"
            raise PeerLost(
                f"a process {end} {where}, the {TRIES}rd in that place: if it is for want of memory, give fewer "
                "--processes or a smaller --batch"
            )
        self.tell(f"a process {end}: another one takes its place")
        if hand.work:
            self.left_over.append(hand.work)
            yield -hand.rows
        self.hire()
