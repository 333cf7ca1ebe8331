"""A thread beside the training that watches all ranks: who is silent, who keeps the others waiting, and since when."""

import json
import os
import platform
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError

from lockstep.base import storage
from lockstep.base.errors import HangDetected, PeerLost
from lockstep.base.events import RunEnded, RunStarted, StepDone
from lockstep.base.world import World
from lockstep.core.host import activity
from lockstep.core.host.loader_stacks import dump_all
from lockstep.observe.diagnose.hang_verdict import Report, ranks_text, verdict
from lockstep.observe.diagnose.stacks import all_stacks, places_in, stack_of, telling
from lockstep.observe.diagnose.store_notes import StoreNotes

SIGKILL = 9
LOOK_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""How long the ranks may take to say where they are."""
FIRST_STEPS_SECONDS = 120.0
"""A step may take so long while no two have been measured."""
TIMES_MEDIAN, LEAST_SECONDS = 10, 30.0
ELSEWHERE = 4
"""A process on another machine may be silent for so many times as long."""
VERDICT = "verdict.json"
"""What a watching thread leaves in the folder of logs when it ends the run: {"rank", "text"}."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a rank is called stuck or silent, and what follows."""

    hang_seconds: float | None
    """A step that takes longer is looked into; None: ten times the median step, at least 30 s."""
    restarts: bool
    """Whether a run that is stuck is ended, for its launcher to start it again; else it is only reported."""
    silent_seconds: float
    """A process that gives no sign of life for so long counts as frozen or lost."""


class Watch:
    """Watches this process, and on the lowest rank that is alive all others, too."""

    def __init__(self, world: World, limits: Limits, logs: Path) -> None:
        self.world, self.limits, self.logs = world, limits, logs
        self.board: StoreNotes | None = None
        self.training_thread = threading.get_ident()
        self.steps_done, self.is_training = 0, False
        self.durations: deque[float] = deque(maxlen=100)
        self._step_ended: float | None = None
        self._stopped = threading.Event()
        self._place, self._place_since = "", time.monotonic()
        self._asked, self._beat = 0, 0
        self._seen: dict[int, tuple[object, float]] = {}
        self._reported: tuple[int, float] | None = None
        """Step and seconds without progress of the last report."""
        self._last_look = self._store_seen = time.monotonic()
        self._parent = os.getppid()

    # ---- what the training thread does

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch from here on; the process group is open."""
        self.logs.mkdir(parents=True, exist_ok=True)
        if self.world.size > 1:
            self.board = StoreNotes(self.world.rank, self.world.size)
        activity.progress()
        thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(LOOK_SECONDS + ANSWER_SECONDS)

    def notice(self, event: object) -> None:
        if isinstance(event, RunStarted):
            activity.progress()
            self.is_training, self.steps_done = True, event.resumed_step
        elif isinstance(event, RunEnded):
            self.is_training = False
        elif isinstance(event, StepDone):
            now = time.monotonic()
            if self._step_ended is not None:
                self.durations.append(now - self._step_ended)
            self._step_ended, self.steps_done = now, event.step
        activity.progress()

    def close(self) -> None:
        """Nothing is kept open."""

    @property
    def limit(self) -> float:
        """Seconds without progress after which somebody is asked."""
        if self.limits.hang_seconds is not None:
            return self.limits.hang_seconds
        if len(self.durations) < 2:
            return FIRST_STEPS_SECONDS
        return max(LEAST_SECONDS, TIMES_MEDIAN * statistics.median(self.durations))

    # ---- what the watching thread does

    def _watch(self) -> None:
        has_failed = False
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                self._look()
            except Exception as error:  # watching must not end because of an error in it
                if not has_failed:
                    self._say(f"the thread that watches failed, and goes on: {type(error).__name__}: {error}")
                has_failed = True
        self._say_if_over()
        if self.board is not None:
            with suppress(DistError):
                self.board.write("beat", "left")

    def _look(self) -> None:
        now = time.monotonic()
        if self.world.has_agent and os.getppid() != self._parent:
            self._leave("the launcher of this process has gone, and the process ends with it", PeerLost.exit_code)
        if now - self._last_look > LOOK_SECONDS + ANSWER_SECONDS:  # this process was frozen itself: all is news
            self._seen.clear()
        self._last_look = now
        self._sample()
        try:
            if self.board is not None:
                self._exchange(self.board)
            if self._is_lowest():
                self._judge_silence()
                self._judge_progress()
            self._store_seen = time.monotonic()
        except DistError:
            lost = time.monotonic() - self._store_seen
            if min(lost, activity.seconds_without_progress()) > self.limits.silent_seconds:
                self._leave(f"no connection to the other processes for {lost:.0f} s", PeerLost.exit_code)

    def _sample(self) -> None:
        """Remember since when the training thread has been where it is."""
        waits = self._waits_in()
        stack = stack_of(self.training_thread)
        place = waits or (str(telling(stack)) if stack else "")
        if place != self._place:
            self._place, self._place_since = place, time.monotonic()

    def _waits_in(self) -> str | None:
        """The collective that the training waits in: its own, or in the backward pass the gradients' thread's."""
        own = activity.waits(self.training_thread)
        stack = stack_of(self.training_thread)
        if own is not None or not stack or "autograd" not in stack[0].file:
            return own
        helpers = [thread for thread in threading.enumerate() if thread.name == "gradients"]
        return next((what for t in helpers if t.ident and (what := activity.waits(t.ident))), None)

    def _exchange(self, board: StoreNotes) -> None:
        """Give a sign of life, answer who asks, and leave when the run is to be ended."""
        self._beat += 1
        if self._beat == 1:
            board.write("who", {"process": os.getpid(), "host": platform.node()})
        board.write("beat", self._beat)
        if board.count("end"):
            self._leave("another process has found out that the run cannot go on", PeerLost.exit_code)
        asked = board.count("ask")
        if asked > self._asked:
            self._asked = asked
            board.write(f"answer-{asked}", self._report().plain())
        for lower in range(self.world.rank):  # the lowest that is alive looks at all others
            self._look_at(board, [lower])
            if self._silence(lower) <= self.limits.silent_seconds:
                return
        self._look_at(board, list(range(self.world.size)))

    def _look_at(self, board: StoreNotes, ranks: list[int]) -> None:
        """Note when each of these ranks last gave a sign of life."""
        for rank, beat in board.read("beat", ranks).items():
            if self._seen.get(rank, (None, 0.0))[0] != beat:
                self._seen[rank] = beat, time.monotonic()

    def _silence(self, rank: int) -> float:
        """Seconds since a rank's last sign of life; 0 for one that has left in peace, or has not begun."""
        beat, at = self._seen.get(rank, ("left", 0.0))
        return 0.0 if beat == "left" else time.monotonic() - at

    def _is_lowest(self) -> bool:
        return all(self._silence(rank) > self.limits.silent_seconds for rank in range(self.world.rank))

    def _judge_silence(self) -> None:
        """End the run when a process is frozen or lost: it could only wait for it."""
        if self.board is None:
            return
        silent = [r for r in range(self.world.size) if self._silence(r) > self.limits.silent_seconds]
        known = self.board.read("who", silent)
        lost = {rank: text for rank in silent if (text := self._fate(rank, known.get(rank, {})))}
        if not lost:
            return
        text = verdict(self._ask([rank for rank in range(self.world.size) if rank not in silent]), list(lost.values()))
        self._end(f"{text}. The run cannot go on with it", known.values())

    def _fate(self, rank: int, who: Mapping[str, Any]) -> str | None:
        """Why a silent rank is silent; None for one on this machine that is alive and only busy in native code."""
        seconds = f"has given no sign of life for {self._silence(rank):.0f} s"
        if who.get("host") != platform.node():
            if self._silence(rank) < ELSEWHERE * self.limits.silent_seconds:
                return None  # nobody here can see whether it is only busy in native code
            return f"rank {rank} (process {who.get('process')} on {who.get('host')}) {seconds}"
        with suppress(psutil.Error):
            status = psutil.Process(who["process"]).status()
            if status not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE):
                return None
            return f"rank {rank} (process {who['process']}) {seconds}: it is {status}"
        return f"rank {rank} (process {who.get('process')}) has gone"

    def _judge_progress(self) -> None:
        """Report a step that takes too long; again each time it has taken twice as long."""
        seconds, step = activity.seconds_without_progress(), self.steps_done + 1
        if not self.is_training or self._stopped.is_set():
            return
        self._say_if_over()
        due = self.limit if self._reported is None else 2 * self._reported[1]
        if seconds < due or self._waits_in() == activity.SAVE:
            return
        self._reported = step, seconds
        reports = self._ask(list(range(self.world.size)))
        answered = {report.rank for report in reports}
        mute = [rank for rank in range(self.world.size) if rank not in answered]
        silent = [f"{ranks_text(mute)} did not answer within {ANSWER_SECONDS:.0f} s"] if mute else []
        file = self.logs / f"hang-step-{step}.txt"
        with suppress(OSError):
            texts = [f"rank {r.rank}, process {r.process} on {r.host}\n{r.stacks}" for r in reports]
            file.write_text("\n\n".join(texts), encoding="utf-8")
        text = f"no progress for {seconds:.0f} s in step {step}: {verdict(reports, silent)}\n  all stacks: {file}"
        is_waited_for = bool(mute) or {report.waits_in is None for report in reports} == {True, False}
        if self.limits.restarts and is_waited_for:  # else it may only be slow: a compilation, a large evaluation
            self._end(text)
        self._say(text)

    def _say_if_over(self) -> None:
        if self._reported is not None and self.steps_done >= self._reported[0]:
            self._say(f"step {self._reported[0]} has ended, training goes on")
            self._reported = None

    def _ask(self, ranks: list[int]) -> list[Report]:
        """What these ranks say of themselves, as far as they answer in time."""
        own = self._report()
        if self.board is None:
            return [own]
        asked = self._asked = self.board.count("ask", 1)
        others, end = [rank for rank in ranks if rank != self.world.rank], time.monotonic() + ANSWER_SECONDS
        answers: dict[int, Report] = {}
        while len(answers) < len(others) and time.monotonic() < end:
            time.sleep(0.1)
            missing = [rank for rank in others if rank not in answers]
            answers |= {r: Report(**plain) for r, plain in self.board.read(f"answer-{asked}", missing).items()}
        self._last_look = time.monotonic()  # the wait was ours
        return sorted([own, *answers.values()], key=lambda report: report.rank)

    def _report(self) -> Report:
        stack, waits, since = stack_of(self.training_thread), self._waits_in(), self._place_since
        place, stacks = str(telling(stack)) if stack else "nowhere", all_stacks()
        if waits is None and any("torch/utils/data/dataloader" in each.file for each in stack):
            for process, dump in dump_all().items():
                stacks += f"\nloader worker, process {process}:\n{dump}"
                worker = places_in(dump)
                if any("_utils/fetch" in each.file for each in worker):
                    place = f"{telling(worker)} (its loader's worker process {process})"
        return Report(
            rank=self.world.rank,
            process=os.getpid(),
            host=platform.node(),
            step=self.steps_done + 1,
            waits_in=waits,
            place=place,
            seconds=time.monotonic() - since,
            stacks=stacks,
        )

    def _end(self, text: str, frozen: Iterable[Mapping[str, Any]] = ()) -> None:
        """Say why, make every process leave, and leave: whoever started them decides what comes next."""
        with suppress(OSError):
            storage.write(self.logs / VERDICT, json.dumps({"rank": self.world.rank, "text": text}))
        if self.board is not None:
            with suppress(DistError):
                self.board.count("end", 1)
        for who in frozen:
            if who.get("host") == platform.node():
                with suppress(OSError):  # it would not hear any other signal
                    os.kill(who["process"], SIGKILL)
        self._leave(text, HangDetected.exit_code)

    def _leave(self, text: str, code: int) -> None:
        self._say(text)
        os._exit(code)

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
