"""When a run with a time limit has to stop, so that its last checkpoint is written before the limit."""

import time

SPARE_SECONDS = 2.0
"""For ending: summary, observers, process group."""


class Deadline:
    """A limit in minutes from a process's start; only rank 0's is asked."""

    def __init__(self, minutes: float | None, began: float) -> None:
        self.minutes = minutes
        self.end = None if minutes is None else began + minutes * 60
        """Seconds since 1970, as `began`."""
        self._longest = 0.0
        self._last: float | None = None

    def is_near(self, save_seconds: float) -> bool:
        """Whether to stop; asked once per step. A stop takes two more steps, each as long as the longest so far (there
        may be an evaluation in it), and a save twice as long as is to be expected."""
        if self.end is None:
            return False
        now = time.time()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        return now + 3 * self._longest + 2 * save_seconds + SPARE_SECONDS >= self.end
