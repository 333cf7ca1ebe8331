"""Lesson 19: where the time of a step goes. Run: python lessons/19_profiling.py [FOLDER], to keep the traces there."""

import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

RANGES = ("data", "forward", "backward", "all-reduce", "optimizer")


def step(rank, model, optimizer):
    with record_function("data"):  # a range: a name for everything that runs inside
        time.sleep(0.1 if rank == 1 else 0)  # the planted fault: rank 1 has a slow loader
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
    with record_function("forward"):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    with record_function("backward"):
        optimizer.zero_grad()
        loss.backward()
    with record_function("all-reduce"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    with record_function("optimizer"):
        optimizer.step()


def work(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = schedule(wait=2, warmup=1, active=3, repeat=1)  # 2 steps without profiler, 1 discarded, 3 kept, then none
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
        for _ in range(8):
            step(rank, model, optimizer)
            profiler.step()  # the schedule counts these calls
    spent = {each.key: each.cpu_time_total for each in profiler.key_averages() if each.key in RANGES}  # microseconds
    largest = max(spent, key=spent.get)
    assert largest == ["all-reduce", "data"][rank] and spent[largest] > 0.5 * sum(spent.values())
    profiler.export_chrome_trace(f"{folder}/trace-rank-{rank}.json")
    with open(f"{folder}/trace-rank-{rank}.json") as file:
        events = [each for each in json.load(file)["traceEvents"] if each.get("cat") == "user_annotation"]
    assert all([each["name"] for each in events].count(name) == 3 for name in RANGES)  # of the three steps kept
    lines = [None, None]
    dist.all_gather_object(lines, f"rank {rank}: more than half of the time in {largest}")
    if rank == 0:
        print(f"ranges in a trace, each three times: {', '.join(RANGES)}", *lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler of the processes started below writes nothing to stderr
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(f"{folder}/store", (sys.argv + [folder])[1]), nprocs=2)
