"""Which collectives are not finished: read from torch's flight recorder, which records Gloo's collectives as NCCL's."""

import os
import subprocess
import sys

import pytest
from torch._C import _distributed_c10d

from lockstep.core.distributed import flight_recorder
from lockstep.core.host import activity
from lockstep.observe.diagnose import hang_watch

RANK = """
import os, sys, time
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from lockstep.core.distributed import flight_recorder

rank, folder = int(sys.argv[1]), sys.argv[2]
flight_recorder.enable("cpu:gloo,cuda:nccl")
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
group = dist.new_group([0, 1])
for _ in range(3):
    dist.all_reduce(torch.ones(4), group=group)
if rank == 0:
    works = [dist.all_gather([torch.empty(4)] * 2, torch.ones(4), group=group, async_op=True) for _ in range(2)]
    works.append(dist.all_reduce(torch.ones(4), async_op=True))
    while "all_reduce" in (found := flight_recorder.unfinished(_distributed_c10d._dump_fr_trace_json))[0]:
        time.sleep(0.05)  # the first three are done, but Gloo's thread has not said so yet
    print(found, flush=True)
    open(f"{folder}/done", "w").close()
while not os.path.exists(f"{folder}/done"):
    time.sleep(0.05)
os._exit(0)
"""


def test_the_first_unfinished_collective_of_each_group_is_named(tmp_path):
    """Rank 1 is in none of those that rank 0 has begun after three."""
    command = [sys.executable, "-c", RANK]
    with subprocess.Popen([*command, "1", str(tmp_path)]) as other:
        try:
            done = subprocess.run(
                [*command, "0", str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
            )
        finally:
            other.kill()
    assert (
        done.stdout.strip() == '["gloo\'s all_gather, number 4 of group 1", "gloo\'s all_reduce, number 1 of group 0"]'
    )


def test_where_nothing_is_recorded_nothing_is_unfinished():
    assert flight_recorder.unfinished(None) == []
    assert flight_recorder.unfinished(_distributed_c10d._dump_fr_trace_json) == []


def test_only_collectives_on_gpus_are_recorded(monkeypatch):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    flight_recorder.enable("gloo")
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ


@pytest.mark.parametrize("on_gpu", [[], ["nccl's all_reduce, number 7 of group 0"]])
def test_a_gpu_that_waits_is_waited_for_by_nobody(monkeypatch, on_gpu):
    """Its host may be anywhere, or wait in another collective."""
    monkeypatch.setattr(flight_recorder, "unfinished", lambda: on_gpu)
    thread = hang_watch.TrainingThread()
    assert thread.report(0, 3).waits_in == (on_gpu[0] if on_gpu else None)
    with activity.waiting_in("a decision of rank 0"):
        report = thread.report(0, 3)
    assert report.waits_in == (on_gpu[0] if on_gpu else "a decision of rank 0")
    assert report.stacks.startswith("not finished: nccl's all_reduce" if on_gpu else "thread ")
