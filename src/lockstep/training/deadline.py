"""Stop a run early enough to write its last checkpoint before train.max_minutes."""

import time

SPARE_SECONDS = 2.0
"""Reserve for the end of the run: summary, observers, process group."""


class Deadline:
    """A limit in minutes from the start of the process; only rank 0's counts."""

    def __init__(self, minutes: float | None, began: float) -> None:
        self.minutes = minutes
        self.end = None if minutes is None else began + minutes * 60
        """Unix time, like `began`."""
        self._longest = 0.0
        self._last: float | None = None

    def is_near(self, save_seconds: float) -> bool:
        """Whether to stop now; called once per step. Allows for two more steps, each as long as the longest so far
        (which may include an evaluation), and a save of twice the expected duration."""
        if self.end is None:
            return False
        now = time.time()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        return now + 3 * self._longest + 2 * save_seconds + SPARE_SECONDS >= self.end
