"""Hugging Face's Trainer at its best on texts: bf16, dynamic padding, grouped lengths, a fused optimizer."""

from typing import Any

import torch
from arguments import arguments
from meter import Meter
from torch.utils.data import Dataset
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments
from works import MAX_LENGTH, read_texts, text_model, tokenizer


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, rows: list[list[int]], labels: list[int]) -> None:
        self.rows = [{"input_ids": row, "label": label} for row, label in zip(rows, labels, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Clock(TrainerCallback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.meter.step()


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    words = tokenizer(given.model)
    texts, labels = read_texts(given.data, given.work.samples)
    rows = words(texts, truncation=True, max_length=MAX_LENGTH, return_attention_mask=False)["input_ids"]
    torch.manual_seed(0)
    meter = Meter(given.out, given.rank, given.work.steps)
    settings = TrainingArguments(
        str(given.out / "trainer"),
        per_device_train_batch_size=given.batch,
        num_train_epochs=1,
        learning_rate=given.work.learning_rate,
        bf16=given.is_bf16,
        use_cpu=given.device.type == "cpu",
        train_sampling_strategy="group_by_length",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        ddp_backend="gloo" if given.world > 1 else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        text_model(given.work.model, given.model),
        settings,
        train_dataset=Rows(rows, labels),
        data_collator=DataCollatorWithPadding(words, pad_to_multiple_of=8),
        callbacks=[Clock(meter)],
    ).train()
    meter.finish()


if __name__ == "__main__":
    main()
