"""What Lockstep's runs of compare.py use: an observer that is their meter, and the language model with its data."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from gpt import BYTES, GPT, SIZES, sequences
from meter import Meter
from torch import Tensor, nn

from lockstep import DataSpec, LossSum
from lockstep.base.events import Evaluated, StepDone


class Clock:
    """Observer: rank 0's meter."""

    def __init__(self, steps: int) -> None:
        self.steps, self.meter = steps, Meter(Path(os.environ["METER"]), rank=0, steps=steps)
        self.meter.profiles = False  # observe.profile_steps does

    def notice(self, event: Any) -> None:
        if isinstance(event, StepDone):
            self.meter.step()
            if event.step == self.steps:
                self.meter.finish()

    def close(self) -> None:
        pass


class Target:
    """Observer: writes down when a test accuracy is reached."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy, self.file = accuracy, Path(os.environ["METER"]) / "reached.json"

    def notice(self, event: Any) -> None:
        if isinstance(event, Evaluated) and event.values["accuracy"] >= self.accuracy and not self.file.exists():
            reached = {"seconds": time.time() - float(os.environ["BEGAN"]), "step": event.step}
            self.file.write_text(json.dumps(reached), encoding="utf-8")

    def close(self) -> None:
        pass


def observers(options: dict[str, Any]) -> list[Clock | Target]:
    return [Target(options["target"])] if "target" in options else [Clock(options["steps"])]


class Sequences:
    """Bytes [T + 1] of each sample; the label is there because every source has one."""

    spec = DataSpec(modality="tokens", labels=("none",))
    lengths = None

    def __init__(self, size: str, samples: int) -> None:
        self.rows = sequences(SIZES[size], samples)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> dict[str, np.ndarray]:
        return {"tokens": self.rows[list(indices)], "label": np.zeros(len(indices), np.int64)}


def source(options: dict[str, Any], split: str) -> Sequences:
    return Sequences(options["size"], options["samples"] if split == "train" else 16)


def build(options: dict[str, Any], _: DataSpec) -> nn.Module:
    return GPT(SIZES[options["size"]])


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> LossSum:
    targets = batch["tokens"][:, 1:].long().reshape(-1)
    return LossSum(F.cross_entropy(outputs.reshape(-1, BYTES), targets, reduction="sum"), targets.numel())


def metrics(_: DataSpec) -> dict[str, Any]:
    return {}
