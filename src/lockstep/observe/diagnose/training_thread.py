"""Where the training thread is and since when, seen from another thread."""

import os
import platform
import threading
import time

from lockstep.core.host import activity
from lockstep.core.host.loader_stacks import dump_all
from lockstep.observe.diagnose.hang_verdict import Report
from lockstep.observe.diagnose.stacks import all_stacks, parsed, stack_of, telling


class TrainingThread:
    """The thread that makes this object."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.location, self.since = "", time.monotonic()

    def waits_in(self) -> str | None:
        """The collective that it waits in, if so."""
        return activity.waits_for_others(self.ident)

    def sample(self) -> None:
        """Note the time whenever it has moved."""
        stack = stack_of(self.ident)
        location = self.waits_in() or (str(telling(stack)) if stack else "")
        if location != self.location:
            self.location, self.since = location, time.monotonic()

    def report(self, rank: int, step: int) -> Report:
        """Its location with all stacks; that of a data loader's worker process where it waits for one."""
        stack, waits, since = stack_of(self.ident), self.waits_in(), self.since
        location, stacks = str(telling(stack)) if stack else "nowhere", all_stacks()
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
