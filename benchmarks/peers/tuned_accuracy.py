"""The tuned loop on MNIST until its test accuracy reaches a target: what compare.py's counterpart to_accuracy.py times.

python tuned_accuracy.py --data FOLDER --out FILE --target 0.99 --every 100 [--precision fp32]
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from works import CNN, normalized, read_images

GLOBAL_BATCH, LEARNING_RATE, EPOCHS, TEST_BATCH = 128, 1e-3, 10, 500


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, *, is_bf16: bool) -> float:
    """Of the test split, of which each rank measures its part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own, right = range(rank * TEST_BATCH, len(images), world * TEST_BATCH), torch.zeros(1, dtype=torch.int64)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        for start in own:
            part = slice(start, start + TEST_BATCH)
            right += (model(channels_last(images[part])).argmax(1) == labels[part]).sum()
    model.train()
    dist.all_reduce(right)
    return float(right) / len(images)


def channels_last(images: Tensor) -> Tensor:
    return normalized(images).to(memory_format=torch.channels_last)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--target", type=float)
    parser.add_argument("--every", type=int)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    given = parser.parse_args()
    is_bf16 = given.precision == "bf16"
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed = int(os.environ["SEED"])
    torch.manual_seed(seed)
    model = DistributedDataParallel(
        CNN().to(memory_format=torch.channels_last), gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    images, labels = (torch.from_numpy(each.copy()) for each in read_images(given.data, "train"))
    tests = tuple(torch.from_numpy(each.copy()) for each in read_images(given.data, "t10k"))
    generator, step = np.random.default_rng(seed), 0
    for _ in range(EPOCHS):
        order = torch.from_numpy(generator.permutation(len(images)))
        for rows in order.split(GLOBAL_BATCH):
            own = rows[rank::world]
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                loss = F.cross_entropy(model(channels_last(images[own])), labels[own])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % given.every == 0 and accuracy(model.module, *tests, is_bf16=is_bf16) >= given.target:
                if rank == 0:
                    reached = {"seconds": time.time() - float(os.environ["BEGAN"]), "step": step}
                    given.out.write_text(json.dumps(reached), encoding="utf-8")
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    main()
