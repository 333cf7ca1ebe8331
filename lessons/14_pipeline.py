"""Lesson 14: a pipeline, each rank holds some of the layers. Run: python lessons/14_pipeline.py."""

import tempfile
import time

import torch
import torch.distributed as dist

from lockstep.run import teaching


def show(stages, micro_batches):  # a row per stage, a column per tick: the time of a forward (F) or backward (B) pass
    ahead = [["--"] * s + [f"F{k}" for k in range(micro_batches)] + ["--"] * (stages - 1 - s) for s in range(stages)]
    rows = [row + [cell.replace("F", "B") for cell in reversed(row)] for row in ahead]  # back: the mirror image
    idle = sum(row.count("--") for row in rows) / sum(map(len, rows))
    assert idle == (stages - 1) / (micro_batches + stages - 1)
    print(f"{stages} stages, {micro_batches} micro-batches, {idle:.0%} idle:", *map(" ".join, rows), sep="\n")


def build(options=None, spec=None):
    torch.manual_seed(0)
    return torch.nn.Sequential(teaching.Pixels(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data, model = teaching.digits("train"), build()
    stage = model[:3] if rank == 0 else model[3:]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    for step in range(22):  # an epoch without its last batch, which is smaller than 64
        micro_batches, passes = teaching.order(1442, step, global_batch=64, micro_batch=32), []
        if rank == 0:
            for rows in micro_batches:
                passes.append(stage({"image": data["image"][rows]}))
                dist.send(passes[-1].detach(), dst=1)  # the activations go on; the graph of autograd stays here
            for output in reversed(passes):
                dist.recv(gradient := torch.empty_like(output), src=1)
                output.backward(gradient)  # continues where stage 1 has stopped
        else:
            for rows in micro_batches:
                dist.recv((received := torch.empty(len(rows), 32, requires_grad=True)).data, src=0)
                passes.append((received, torch.nn.functional.cross_entropy(stage(received), data["label"][rows])))
            for received, loss in reversed(passes):
                (loss / 2).backward()  # a mean over 32 samples: half of it, twice, is the mean over 64
                dist.send(received.grad, dst=0)
        optimizer.step()
        optimizer.zero_grad()
    [dist.broadcast(parameter.data, src=1) for parameter in model[3:].parameters()]
    dist.destroy_process_group()
    time.sleep(0.5)  # torch 2.13 with gloo sometimes aborts a process that ends right after its last backward pass
    if rank == 0:
        [show(*each) for each in ((2, 2), (4, 8))]
        recipe = ["train.steps=22", "train.global_batch=64", "train.micro_batch=32", "optim.lr=0.1"]
        print(teaching.compare(model, __file__, [*recipe, "parallel.kind=pipeline"], processes=2))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(f"{folder}/store",), nprocs=2)
