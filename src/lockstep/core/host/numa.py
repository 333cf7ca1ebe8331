"""Binds a process to the cores near its GPU."""

import os
from contextlib import suppress
from pathlib import Path

import torch
from torch.numa import binding

NODES = Path("/sys/devices/system/node")


def bind_near(device: torch.device, nodes: Path = NODES) -> None:
    """Bind this thread, and those that it starts later, to its allowed cores on the NUMA node of its GPU: copies
    between them then cross no other node. On Linux, where there are several nodes."""
    if device.type != "cuda" or len(list(nodes.glob("node[0-9]*"))) < 2:
        return
    options = binding.NumaOptions(binding.AffinityMode.NODE)
    with suppress(Exception):  # a virtual machine without NUMA data, another version of torch: it would only be faster
        os.sched_setaffinity(0, binding._get_logical_cpus_to_bind_to(gpu_index=device.index, numa_options=options))
