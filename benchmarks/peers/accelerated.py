"""Hugging Face Accelerate: a plain loop with bf16, texts tokenized beforehand, padded to the longest of their batch."""

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from arguments import Arguments, arguments
from gpt import BYTES
from meter import Meter
from textbook import Images, Sequences, network
from torch import Tensor
from torch.utils.data import DataLoader
from works import MAX_LENGTH, padded, read_texts, tokenizer


def loader(given: Arguments) -> DataLoader[Any]:
    """Batches of one process; `prepare` shares them out."""
    options: dict[str, Any] = {"batch_size": given.batch, "num_workers": given.workers, "pin_memory": given.workers > 0}
    if not given.work.is_text:
        data = (Images if given.work.model == "cnn" else Sequences)(given)
        return DataLoader(data, shuffle=True, **options)
    texts, labels = read_texts(given.data, given.work.samples)
    rows = tokenizer(given.model)(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]

    def collate(samples: list[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
        batch = padded([row for row, _ in samples], [label for _, label in samples])
        return batch, batch.pop("labels")

    return DataLoader(list(zip(rows, labels, strict=True)), shuffle=True, collate_fn=collate, **options)  # type: ignore[arg-type]


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)
    precision, is_cpu = "bf16" if given.is_bf16 else "no", given.device.type == "cpu"
    accelerator = Accelerator(mixed_precision=precision, cpu=is_cpu, kwargs_handlers=[ddp])
    torch.manual_seed(0)
    net = network(given)
    optimizer = torch.optim.AdamW(net.parameters(), lr=given.work.learning_rate, fused=True)
    model, optimizer, batches = accelerator.prepare(net, optimizer, loader(given))
    meter = Meter(given.out, given.rank, given.work.steps)
    for inputs, labels in batches:
        outputs = model(**inputs).logits if isinstance(inputs, dict) else model(inputs)
        with accelerator.autocast():
            loss = F.cross_entropy(outputs.view(-1, BYTES) if outputs.ndim == 3 else outputs, labels.reshape(-1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()
    meter.finish()
    accelerator.end_training()


if __name__ == "__main__":
    main()
