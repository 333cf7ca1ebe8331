"""The arguments of every contender, and its place among the processes."""

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from works import WORKS, Work


@dataclass(frozen=True)
class Arguments:
    work: Work
    data: Path
    """Folder with mnist/ and ag_news/."""
    model: Path
    """Folder with MiniLM's weights and tokenizer."""
    out: Path
    """Folder for the meters' files."""
    rank: int
    world: int
    device: torch.device
    is_bf16: bool
    """Whether forward passes run in bf16; the textbook loop's are always in fp32."""
    is_compiled: bool
    """By torch.compile; the tuned loop only."""

    def autocast(self) -> AbstractContextManager[None]:
        """For the forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.is_bf16 else nullcontext()

    @property
    def workers(self) -> int:
        """Processes that load data: a GPU would wait for one that does so by itself."""
        return 4 if self.device.type == "cuda" else 0

    @property
    def batch(self) -> int:
        """Samples of a step on each process."""
        return self.work.global_batch // self.world


def arguments() -> Arguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True, choices=WORKS)
    for name in ("--data", "--model", "--out"):
        parser.add_argument(name, required=True, type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folders, device = (given.data, given.model, given.out), torch.device(given.device)
    return Arguments(WORKS[given.work], *folders, rank, world, device, given.precision == "bf16", given.compile)
