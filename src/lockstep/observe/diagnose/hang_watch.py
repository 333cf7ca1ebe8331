"""A thread beside the training that watches all ranks: which is silent, and which keeps the others waiting."""

import json
import os
import platform
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import DistError

from lockstep.base import storage
from lockstep.base.errors import HangDetected, PeerLost
from lockstep.base.events import Observer, RunEnded, RunStarted, StepDone
from lockstep.base.world import World
from lockstep.core.distributed import flight_recorder
from lockstep.core.host import activity
from lockstep.core.host.loader_stacks import dump_all
from lockstep.observe.diagnose.hang_verdict import Report, ranks_text, verdict
from lockstep.observe.diagnose.heartbeats import SIGKILL, Heartbeats
from lockstep.observe.diagnose.stacks import all_stacks, parsed, stack_of, telling
from lockstep.observe.diagnose.store_notes import StoreNotes

VERDICT = "verdict.json"
"""The report of the watchdog thread in the folder of logs: {"rank", "text"}."""


class TrainingThread:
    """The thread that creates this object."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.location, self.since = "", time.monotonic()

    def waits_in(self) -> str | None:
        """Return the collective that it waits in, if any."""
        return activity.waits_for_others(self.ident)

    def sample(self) -> None:
        """Record the time whenever its location has changed."""
        stack = stack_of(self.ident)
        location = self.waits_in() or (str(telling(stack)) if stack else "")
        if location != self.location:
            self.location, self.since = location, time.monotonic()

    def report(self, rank: int, step: int) -> Report:
        """Report its location with all stacks; that of a data loader's worker process where it waits for one, and the
        collective that its GPU waits in."""
        stack, waits, since = stack_of(self.ident), self.waits_in(), self.since
        location, stacks = str(telling(stack)) if stack else "nowhere", all_stacks()
        if on_gpu := flight_recorder.unfinished():
            waits, stacks = on_gpu[0], f"not finished: {'; '.join(on_gpu)}\n{stacks}"
        if waits is None and any("torch/utils/data/dataloader" in each.file for each in stack):
            for process, dump in dump_all().items():
                stacks += f"\nloader worker, process {process}:\n{dump}"
                worker = parsed(dump)
                if any("_utils/fetch" in each.file for each in worker):
                    location = f"{telling(worker)} (its loader's worker process {process})"
        return Report(
            rank=rank,
            process=os.getpid(),
            host=platform.node(),
            step=step,
            waits_in=waits,
            location=location,
            seconds=time.monotonic() - since,
            stacks=stacks,
        )


LOOK_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""Time for ranks to report their locations."""
FIRST_STEPS_SECONDS = 120.0
"""Limit of a step while no two have been measured."""
TIMES_MEDIAN, LEAST_SECONDS = 10, 30.0
"""Limit of later steps: so many times the median, at least so many seconds."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits from which a rank counts as stuck or silent, and the reaction."""

    hang_seconds: float | None
    """A longer step is diagnosed; None: ten times the median step, at least 30 s, but before collectives time out."""
    timeout_seconds: float
    """Timeout of a collective."""
    restarts: bool
    """Whether a stuck run is ended, for its launcher to restart it; else it is only reported."""
    silent_seconds: float
    """A process without heartbeats for this long counts as frozen or lost."""
    recovers_live: bool = False
    """Whether the others go on where a process is ended; the launcher looks after those that are frozen or lost."""


class Watch(Observer):
    """Watches this process and, on the lowest rank that is alive, all others."""

    def __init__(self, world: World, limits: Limits, logs: Path) -> None:
        self.world, self.limits, self.logs = world, limits, logs
        self.heartbeats: Heartbeats | None = None
        """None without other processes."""
        self.thread = TrainingThread()
        self.steps_done, self.is_training = 0, False
        self.durations: deque[float] = deque(maxlen=100)
        self._step_ended: float | None = None
        self._stopped = threading.Event()
        self._last_request = 0
        """Number of the last request for reports."""
        self._reported: tuple[int, float] | None = None
        """Step and seconds without progress of the last report."""
        self._last_drop = 0
        """The last step in which this process ended others."""
        self._last_look = self._store_seen = time.monotonic()
        self._parent = os.getppid()

    # ---- called by the training thread

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch from here on; the process group is open."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.move_to(self.world)
        activity.progress()
        thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(LOOK_SECONDS + ANSWER_SECONDS)

    def move_to(self, world: World) -> None:
        """Watch the processes of the group that is open now."""
        heartbeats = None
        if world.size > 1:
            heartbeats = Heartbeats(StoreNotes(world.rank, world.size), self.limits.silent_seconds)
            heartbeats.send()  # at once: one that freezes before its first would never count as silent
        self.world, self.heartbeats, self._last_request = world, heartbeats, 0
        activity.progress()

    def rest(self) -> None:
        """Watch nothing until the next group: this process is no part of the training meanwhile."""
        self.heartbeats, self.is_training = None, False

    def notice(self, event: object) -> None:
        activity.progress()  # before is_training is set: the preparation may have taken long
        if isinstance(event, RunStarted):
            self.is_training, self.steps_done = True, event.resumed_step
        elif isinstance(event, RunEnded):
            self.is_training = False
        elif isinstance(event, StepDone):
            now = time.monotonic()
            if self._step_ended is not None:
                self.durations.append(now - self._step_ended)
            self._step_ended, self.steps_done = now, event.step

    # ---- called by the watching thread

    def _watch(self) -> None:
        has_failed = False
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                self._look()
            except Exception as error:  # an error in it must not end the watching
                if not has_failed:
                    self._log(f"the thread that watches failed, and goes on: {type(error).__name__}: {error}")
                has_failed = True
        self._log_if_over()
        if self.heartbeats is not None:
            self.heartbeats.send_last()

    def _look(self) -> None:
        now = time.monotonic()
        if self.world.has_agent and os.getppid() != self._parent:
            self._leave("the launcher of this process has ended, and the process ends with it", PeerLost.exit_code)
        was_frozen, self._last_look = now - self._last_look > LOOK_SECONDS + ANSWER_SECONDS, now
        self.thread.sample()
        try:
            if self.heartbeats is None:
                self._check_progress()
            else:
                self._look_at_others(self.heartbeats, was_frozen=was_frozen)
            self._store_seen = time.monotonic()
        except DistError:
            lost = time.monotonic() - self._store_seen
            if min(lost, activity.seconds_without_progress()) > self.limits.silent_seconds:
                self._leave(f"no connection to the other processes for {lost:.0f} s", PeerLost.exit_code)

    def _look_at_others(self, heartbeats: Heartbeats, *, was_frozen: bool) -> None:
        if was_frozen:
            heartbeats.forget()
        self._exchange(heartbeats)
        if heartbeats.is_lowest_alive():
            self._check_silence(heartbeats)
            self._check_progress()

    def _exchange(self, heartbeats: Heartbeats) -> None:
        """Send a heartbeat, answer requests for a report, and leave when the run is to end."""
        heartbeats.send()
        if heartbeats.notes.count("end"):
            self._leave("another process has found out that the run cannot go on", PeerLost.exit_code)
        if self.limits.recovers_live and heartbeats.notes.count(f"drop-{heartbeats.notes.rank}"):
            os.kill(os.getpid(), SIGKILL)
        number = heartbeats.notes.count("ask")
        if number > self._last_request:
            self._last_request = number
            heartbeats.notes.write(f"answer-{number}", asdict(self._own_report()))
        heartbeats.receive()

    def _check_silence(self, heartbeats: Heartbeats) -> None:
        """End the run when a process is frozen or lost: the others would wait for it forever."""
        if self.limits.recovers_live:
            return
        silent = heartbeats.silent_ranks()
        losses = [text for rank, last in silent.items() if (text := heartbeats.loss(rank, last))]
        if losses:
            text = verdict(self._reports([rank for rank in range(self.world.size) if rank not in silent]), losses)
            self._end(f"{text}. The run cannot go on with it", silent)

    @property
    def limit(self) -> float:
        """Seconds without progress after which all ranks are asked for a report."""
        if self.limits.hang_seconds is not None:
            return self.limits.hang_seconds
        if len(self.durations) < 2:
            limit = FIRST_STEPS_SECONDS
        else:
            limit = max(LEAST_SECONDS, TIMES_MEDIAN * statistics.median(self.durations))
        return min(limit, self.limits.timeout_seconds / 2)

    def _check_progress(self) -> None:
        """Diagnose a step that takes too long; again each time it has taken twice as long."""
        seconds, step = activity.seconds_without_progress(), self.steps_done + 1
        if not self.is_training or self._stopped.is_set():
            return
        self._log_if_over()
        due = self.limit if self._reported is None else 2 * self._reported[1]
        if seconds < due or self.thread.waits_in() == activity.SAVE:
            return
        self._reported, heartbeats = (step, seconds), self.heartbeats
        reports = self._reports(list(range(self.world.size)))
        if self.heartbeats is not heartbeats:  # the processes have changed meanwhile
            return
        mute = sorted({*range(self.world.size)} - {report.rank for report in reports})
        silent = [f"{ranks_text(mute)} did not answer within {ANSWER_SECONDS:.0f} s"] if mute else []
        file = self.logs / f"hang-step-{step}.txt"
        with suppress(OSError):
            texts = [f"rank {r.rank}, process {r.process} on {r.host}\n{r.stacks}" for r in reports]
            file.write_text("\n\n".join(texts), encoding="utf-8")
        text = f"no progress for {seconds:.0f} s in step {step}: {verdict(reports, silent)}\n  all stacks: {file}"
        busy = [report.rank for report in reports if report.waits_in is None]
        is_waited_for = bool(mute) or 0 < len(busy) < len(reports)
        if not (self.limits.restarts and is_waited_for):  # it may only be slow: a compilation, a large evaluation
            self._log(text)
        elif self.limits.recovers_live and self._last_drop != step:
            self._last_drop = step
            self._drop([*mute, *(busy if len(busy) < len(reports) else [])], text)
        else:
            self._end(text)

    def _own_report(self) -> Report:
        return self.thread.report(self.world.rank, self.steps_done + 1)

    def _reports(self, ranks: list[int]) -> list[Report]:
        """Collect the reports of these ranks, as far as they answer in time."""
        own = self._own_report()
        if self.heartbeats is None:
            return [own]
        notes = self.heartbeats.notes
        number = self._last_request = notes.count("ask", 1)
        others, end = [rank for rank in ranks if rank != self.world.rank], time.monotonic() + ANSWER_SECONDS
        answers: dict[int, Report] = {}
        while len(answers) < len(others) and time.monotonic() < end:
            time.sleep(0.1)
            missing = [rank for rank in others if rank not in answers]
            answers |= {rank: Report(**plain) for rank, plain in notes.read(f"answer-{number}", missing).items()}
        self._last_look = time.monotonic()  # this process was not frozen, it waited
        return sorted([own, *answers.values()], key=lambda report: report.rank)

    def _drop(self, ranks: Sequence[int], text: str) -> None:
        """End these processes, this one last: the others go on without them, until they are started again."""
        verb = "is" if len(ranks) == 1 else "are"
        self._log(f"{text}\n{ranks_text(ranks)} {verb} ended, for the others to go on")
        assert self.heartbeats is not None
        for rank in ranks:
            self.heartbeats.notes.count(f"drop-{rank}", 1)
            self.heartbeats.kill_here(rank)
        if self.world.rank in ranks:
            os.kill(os.getpid(), SIGKILL)

    def _log_if_over(self) -> None:
        if self._reported is not None and self.steps_done >= self._reported[0]:
            self._log(f"step {self._reported[0]} has ended, training goes on")
            self._reported = None

    def _end(self, text: str, frozen: Iterable[int] = ()) -> None:
        """Write down why, make every process leave, and leave: the launcher decides what comes next."""
        with suppress(OSError):
            storage.write(self.logs / VERDICT, json.dumps({"rank": self.world.rank, "text": text}))
        if self.heartbeats is not None:
            with suppress(DistError):
                self.heartbeats.notes.count("end", 1)
            for rank in frozen:
                self.heartbeats.kill_here(rank)
        self._leave(text, HangDetected.exit_code)

    def _leave(self, text: str, code: int) -> None:
        self._log(text)
        os._exit(code)

    def _log(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
