"""Settings of chats for language models."""

import datetime
from typing import Literal

from pydantic import Field

from lockstep.base.remote_path import DataPath
from lockstep.data.data_config import Origin, PackedSection


class Config(PackedSection):
    """Chats in JSON lines, of which a language model learns what the assistant says."""

    CHATS = True
    STARTER = {"data": {"train": "data/chats.jsonl"}}
    incidental = PackedSection.incidental | {"train", "test", "date"}  # see Splits.numeric

    train: DataPath
    """A .jsonl file with a chat in each line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
    "content": "..."}]}, and maybe "tools"; or with the columns conversations (ShareGPT), prompt and completion, or
    instruction, input and output (Alpaca). The tokenizer's chat template joins them, or else a plain one."""
    test: DataPath | None = None
    """Test data, in the same form; without it a part of `train` is held out."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """How much of `train` is held out when there is no `test`: always the same chats, whatever the seed."""
    messages_column: str = "messages"
    """The name of the list of messages."""
    turns: Literal["all", "last"] = "all"
    """Answers of a chat that have a loss: all, or the last one; earlier ones are context."""
    date: datetime.date | None = None
    """Date that a chat template gets in training, such as 2026-07-01, where it writes the current one; by default that
    of the run's first start. Answers of the trained model use the current date."""

    def origin(self) -> Origin:
        return Origin(name=self.train.stem or self.train.name)
