"""Lesson 4: what torch.nn.DataParallel does, and why not to use it. Run: python lessons/04_data_parallel.py."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

DEVICES = 2  # imagined: on a CPU, each part of a batch gets a copy of the model and a thread
copied = []  # the bytes of each copy


def replicate(model):
    """A copy whose weights are clones, through which gradients flow back into the weights of the model itself."""
    replica = copy.deepcopy(model)  # its buffers are its own
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    copied.append(sum(tensor.nbytes for tensor in model.state_dict().values()))
    return lambda part: functional_call(replica, weights, part)


def data_parallel(model, batch):
    """One forward pass: scatter, replicate, apply in threads, gather. Device 0 uses the model itself."""
    parts = batch.chunk(DEVICES)
    replicas = [model] + [replicate(model) for _ in parts[1:]]  # in every step, because the weights have changed
    with ThreadPoolExecutor(DEVICES) as threads:
        outputs = threads.map(lambda replica, part: replica(part), replicas, parts)
        return torch.cat(list(outputs))  # all of them on device 0, where the loss is computed


torch.manual_seed(0)
torch.set_num_threads(1)

# 1. The gradients are right, even for parts of 32 and 31 samples: there is one loss, over the gathered outputs.
x, y = torch.randn(63, 100), torch.randn(63, 10)
model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
expected = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
for _ in range(3):
    model.zero_grad()
    mse_loss(data_parallel(model, x), y).backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(found, expected, strict=True))
assert len(copied) == 3 * (DEVICES - 1)
print(f"gradients of {DEVICES} parts: those of the whole batch")
print(f"3 steps: {len(copied)} copies of the model, {sum(copied) / 1000:.0f} kB")

# 2. A replica's buffers are thrown away with it.
layer = nn.BatchNorm1d(1, momentum=1.0)  # momentum 1: the running mean is the mean of the last batch
data_parallel(layer, torch.tensor([[0.0], [2.0], [8.0], [10.0]]))
assert layer.running_mean == 1, "the mean of 0 and 2"
print(f"running mean: {layer.running_mean.item()}, of the part of device 0; the mean of the whole batch is 5.0")

# 3. One thread at a time runs Python code, such as the forward method of a module.
start, used = time.perf_counter(), time.process_time()
with ThreadPoolExecutor(DEVICES) as threads:
    list(threads.map(sum, [(n % 7 for n in range(2_000_000)) for _ in range(DEVICES)]))
assert (time.process_time() - used) / (time.perf_counter() - start) < 1.5
print(f"{DEVICES} threads of Python code: less than 1.5 cores in use")
