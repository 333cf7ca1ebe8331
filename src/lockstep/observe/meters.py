"""Throughput of training, without the first steps, evaluations and saves."""

import time


class Throughput:
    """Samples per second between calls of `look`, which come where the device is synchronized anyway."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.samples = 0
        self._mark: tuple[float, int] | None = None
        self._paused = 0.0

    def pause(self) -> None:
        self._paused = time.monotonic()

    def resume(self) -> None:
        if self._mark is not None:
            self._mark = self._mark[0] + time.monotonic() - self._paused, self._mark[1]

    def look(self, samples: int) -> float | None:
        """Return the samples per second since the last call; `samples` counts the whole run. None at the first call,
        which ends the warm-up."""
        now, before = time.monotonic(), self._mark
        self._mark = now, samples
        if before is None:
            return None
        seconds, fresh = max(now - before[0], 1e-9), samples - before[1]
        self.samples, self.seconds = self.samples + fresh, self.seconds + seconds
        return fresh / seconds

    @property
    def steady(self) -> float | None:
        """Samples per second since the first call; None when there was no other."""
        return self.samples / self.seconds if self.seconds else None
