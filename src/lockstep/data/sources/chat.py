"""Settings of chats for language models."""

import datetime
from typing import Literal

from lockstep.base.remote_path import DataPath
from lockstep.data.data_config import OwnFilesSection, PackedSection


class Config(PackedSection, OwnFilesSection):
    """Chats in JSON lines, of which a language model learns what the assistant says."""

    CHATS = True
    STARTER = {"data": {"train": "data/chats.jsonl"}}
    incidental = OwnFilesSection.incidental | {"date"}  # see Splits.numeric

    train: DataPath
    """A .jsonl file with a chat in each line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
    "content": "..."}]}, and maybe "tools"; or with the columns conversations (ShareGPT), prompt and completion, or
    instruction, input and output (Alpaca). The tokenizer's chat template joins them, or else a plain one."""
    messages_column: str = "messages"
    """The name of the list of messages."""
    turns: Literal["all", "last"] = "all"
    """Answers of a chat that have a loss: all, or the last one; earlier ones are context."""
    date: datetime.date | None = None
    """Date that a chat template gets in training, such as 2026-07-01, where it writes the current one; by default that
    of the run's first start. Answers of the trained model use the current date."""
