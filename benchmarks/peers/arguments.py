"""The arguments of every contender, and its place among the processes."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

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

    @property
    def batch(self) -> int:
        """Samples of a step on each process."""
        return self.work.global_batch // self.world


def arguments() -> Arguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True, choices=WORKS)
    for name in ("--data", "--model", "--out"):
        parser.add_argument(name, required=True, type=Path)
    given = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Arguments(WORKS[given.work], given.data, given.model, given.out, rank, world)
