"""What somebody writes who knows all of PyTorch's advice: bf16, channels-last, a fused optimizer, batches cut
from memory, texts tokenized beforehand and grouped by length over 50 steps; with several processes DDP with
gradients as views of the buckets and a static graph."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import Arguments, arguments
from gpt import BYTES, SIZES, sequences
from meter import Meter
from textbook import network
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from works import MAX_LENGTH, moved, normalized, padded, read_images, read_texts, tokenizer

Batch = tuple[dict[str, Tensor] | Tensor, Tensor]
WINDOW = 50
"""Steps whose texts are sorted by length together."""


def grouped(lengths: np.ndarray, batch: int, generator: np.random.Generator) -> np.ndarray:
    """A random order in which the texts of a batch have similar lengths."""
    order = generator.permutation(len(lengths))
    windows = [order[start : start + WINDOW * batch] for start in range(0, len(order), WINDOW * batch)]
    batches = [
        some for window in windows for some in np.split(window[np.argsort(lengths[window])], len(window) // batch)
    ]
    generator.shuffle(batches)
    return np.concatenate(batches)


def batches(given: Arguments) -> Iterator[Batch]:
    """This rank's part of every step."""
    generator, work = np.random.default_rng(0), given.work
    if work.is_text:
        texts, labels = read_texts(given.data, work.samples)
        rows = tokenizer(given.model)(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
        order = grouped(np.array([len(row) for row in rows]), work.global_batch, generator)
    elif work.model == "cnn":
        images, labels = read_images(given.data, "train")
        order = generator.permutation(work.samples)
    else:
        tokens = sequences(SIZES[work.model], work.samples)
        order = generator.permutation(work.samples)
    for step in range(work.steps):
        own = order[step * work.global_batch : (step + 1) * work.global_batch][given.rank :: given.world]
        if work.is_text:
            batch = padded([rows[i] for i in own], [labels[i] for i in own])
            yield batch, batch.pop("labels")
        elif work.model == "cnn":
            image = normalized(moved(torch.from_numpy(images[own]), given.device))
            yield image.to(memory_format=torch.channels_last), torch.from_numpy(labels[own])
        else:
            row = torch.from_numpy(tokens[own]).long()
            yield row[:, :-1], row[:, 1:].reshape(-1)


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    net: nn.Module = network(given).to(given.device)
    if given.work.model == "cnn":
        net = net.to(memory_format=torch.channels_last)
    model = torch.compile(net) if given.is_compiled else net
    if given.world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.work.learning_rate, fused=True)
    meter = Meter(given.out, given.rank, given.work.steps)
    for batch in batches(given):
        inputs, labels = (moved(each, given.device) for each in batch)
        with given.autocast():
            outputs = model(**inputs).logits if isinstance(inputs, dict) else model(inputs)
            loss = F.cross_entropy(outputs.view(-1, BYTES) if outputs.ndim == 3 else outputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()
    meter.finish()
    if given.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
