"""Processes near their GPUs: whether there is one, and of which node, is patched in torch here; the binding is real."""

import os

import pytest
import torch
from torch.numa import binding

from lockstep.core.host.numa import bind_near

GPU = torch.device("cuda", 1)
pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads can be bound on Linux only")


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Two, the second of which has GPU 1 and the last core of those that this process may use."""
    before = os.sched_getaffinity(0)
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
    monkeypatch.setattr(binding, "_get_numa_node_index_for_gpu_index", lambda *, gpu_index: gpu_index)
    cores = {0: before, 1: {max(before), max(before) + 1000}}
    place = "_get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED"
    monkeypatch.setattr(binding, place, lambda *, numa_node_index: cores[numa_node_index])
    yield tmp_path
    os.sched_setaffinity(0, before)


def test_a_process_is_bound_to_its_gpus_node(nodes):
    usable = os.sched_getaffinity(0)
    bind_near(torch.device("cpu"), nodes)
    assert os.sched_getaffinity(0) == usable
    bind_near(GPU, nodes)
    assert os.sched_getaffinity(0) == {max(usable)}


def test_a_machine_with_one_node_stays_as_it_is(nodes):
    (nodes / "node1").rmdir()
    usable = os.sched_getaffinity(0)
    bind_near(GPU, nodes)
    assert os.sched_getaffinity(0) == usable


def test_what_cannot_be_found_out_changes_nothing(nodes, monkeypatch):
    def fail(*, gpu_index):
        raise FileNotFoundError(gpu_index)

    monkeypatch.setattr(binding, "_get_numa_node_index_for_gpu_index", fail)
    usable = os.sched_getaffinity(0)
    bind_near(GPU, nodes)
    assert os.sched_getaffinity(0) == usable
