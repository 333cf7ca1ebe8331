"""Memory that a step frees is there for the next one."""

import subprocess
import sys

import pytest

COUNT = """
import random
import resource
import torch
from lockstep.core.host import malloc as allocator

{before}


def step(sizes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [torch.empty(mib, 1 << 18).fill_(1) for mib in sizes]
    while activations:
        activations.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


sizes = [random.Random(0).choice({mib}) for _ in range(20)]
print([step(sizes) for _ in range(10)][-1])
"""


def new_pages(before, *mib):
    """How many pages a process takes anew for twenty tensors of so many MiB, like those that it has freed before."""
    code = COUNT.format(before=before, mib=mib)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's memory is meant")
def test_large_tensors_go_back_or_are_used_again():
    assert new_pages("allocator.return_large_tensors()", 5, 20) >= 20
    assert new_pages("allocator.return_large_tensors(); allocator.keep_freed_memory()", 5, 20) < 20
