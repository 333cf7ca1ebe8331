"""What the driver says of GPUs: which figures are read, how often, and what becomes of those that it does not tell."""

import math

import pytest
import torch

from lockstep.core.host import gpu_meter
from lockstep.core.host.gpu_meter import FIGURES, GpuMeter, known, scalars

GPU = torch.device("cuda", 0)


def refuse(device):
    raise LookupError(f"NVML does not support this on {device}")


def test_a_cpu_is_not_asked():
    assert GpuMeter(torch.device("cpu"), {"celsius": refuse}).look() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without GPUs")
def test_a_machine_that_tells_nothing_has_no_figures():
    """Whether its driver or the package for it is missing."""
    found = GpuMeter(GPU).look()
    assert len(found) == len(FIGURES) == 4
    assert all(math.isnan(value) for value in found)


def test_figures_are_read_once_a_second_at_most(monkeypatch):
    asked = []
    meter = GpuMeter(GPU, {"celsius": lambda device: asked.append(device) or 60 + len(asked), "watts": refuse})
    assert meter.look()[0] == meter.look()[0] == 61
    assert asked == [GPU]
    monkeypatch.setattr(gpu_meter, "LEAST_SECONDS", 0.0)
    assert meter.look()[0] == 62
    assert math.isnan(meter.look()[1])


def test_a_figure_counts_where_all_ranks_have_it():
    found = known({"celsius": (50.0, 70.0), "watts": (300.0, math.nan)})
    assert found == {"celsius": (50.0, 70.0)}
    assert scalars(found) == {"celsius": 60.0, "most_celsius": 70.0}
