"""Figures of a GPU from its driver, as nvidia-smi shows them: for the whole GPU, with all programs that use it."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Read = Callable[[torch.device], float]
FIGURES: dict[str, Read] = {
    "utilization_percent": torch.cuda.utilization,
    "used_gigabytes": lambda device: torch.cuda.device_memory_used(device) / 1e9,
    "watts": lambda device: torch.cuda.power_draw(device) / 1000,
    "celsius": torch.cuda.temperature,
}
"""utilization: percent of the driver's last sample period, up to a second, in which any kernel ran."""
LEAST_SECONDS = 1.0
"""Seconds between two readings: the driver measures no more often, and a reading takes time of the training thread."""


class GpuMeter:
    """Figures of a GPU; of a CPU it has none."""

    def __init__(self, device: torch.device, figures: Mapping[str, Read] = FIGURES) -> None:
        self.device = device
        self.figures = dict(figures) if device.type == "cuda" else {}
        self._found, self._seen = [math.nan] * len(self.figures), -math.inf

    def look(self) -> list[float]:
        """Return each of `figures` now, or up to LEAST_SECONDS ago; NaN for one that this machine does not report."""
        if self.figures and time.monotonic() - self._seen >= LEAST_SECONDS:
            self._found, self._seen = [self._read(read) for read in self.figures.values()], time.monotonic()
        return self._found

    def _read(self, read: Read) -> float:
        try:
            return float(read(self.device))
        except Exception:  # NVMLError, which cannot be imported everywhere: no driver, not supported, a GPU in parts
            return math.nan


def known(figures: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Return the figures that are known of all ranks: name -> value of each rank."""
    return {name: tuple(values) for name, values in figures.items() if all(map(math.isfinite, values))}


def scalars(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of figures by rank as NAME, and the highest as most_NAME."""
    found = {name: statistics.fmean(values) for name, values in figures.items() if values}
    return found | {f"most_{name}": max(values) for name, values in figures.items() if values}
