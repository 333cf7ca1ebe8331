"""Lesson 13: FSDP, each rank holds a part of every layer. Run: python lessons/13_fsdp.py."""

import re
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # noqa: TID253
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.run import teaching


class Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, operation, _, *inputs):  # PyTorch calls it for every operation inside `with`
        if found := re.search("allgather|reduce_scatter|mm", operation.name()):  # mm: matrix multiplication
            self.seen.append(found.group())
        return operation(*inputs[0], **inputs[1])


def build(options=None, spec=None):
    torch.manual_seed(0)
    return torch.nn.Sequential(teaching.Pixels(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data, model, whole, recorder = teaching.digits("train"), build(), build(), Recorder()
    for unit in (model[1], model[3], model):  # the parameters of a unit are gathered, used and freed together
        fully_shard(unit)  # the last unit holds what is in no other: nothing here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(46):  # two epochs of batches of 64, of which each rank takes half
        halves, recorder.seen = teaching.order(1442, step, global_batch=64, micro_batch=32), []
        batch = {name: values[halves[rank]] for name, values in data.items()}
        optimizer.zero_grad()
        with recorder:
            loss = torch.nn.functional.cross_entropy(model(batch), batch["label"], reduction="sum")
            recorder.seen.append("| backward:")
            (loss * 2).backward()  # times the ranks, because FSDP takes the mean over them
        for parameter in model.parameters():
            parameter.grad *= 1 / sum(map(len, halves))  # a DTensor, as the parameter is: a rank has its part
        optimizer.step()
    assert recorder.seen[:4] == ["allgather", "mm"] * 2 and recorder.seen.count("reduce_scatter") == 2
    whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))  # all-gathers
    dist.destroy_process_group()
    held = [(x, x.grad, optimizer.state[x]["momentum_buffer"]) for x in model.parameters()]
    assert [sum(x.to_local().numel() for x in kind) for kind in zip(*held, strict=True)] == [1205, 1205, 1205]
    if rank == 0:
        for name, x in model.named_parameters():
            print(f"{name} {list(x.shape)}: each rank holds {list(x.to_local().shape)}")
        print(f"{sum(x.numel() for x in whole.parameters())} numbers: each rank holds 1205\none step:", *recorder.seen)
        recipe = ["train.steps=46", "train.global_batch=64", "train.micro_batch=32", "optim.lr=0.1"]
        print(teaching.compare(whole, __file__, [*recipe, "parallel.kind=fsdp"], processes=2))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(f"{folder}/store",), nprocs=2)
