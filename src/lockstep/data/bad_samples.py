"""Samples that cannot be read: how they are told, and the list of those that were left out."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from lockstep.base import storage

MOST_NAMED = 100
"""Of those left out, so many are named in the summary; the files name all."""
MOST_OF_A_LINE = 1 << 20
"""Bytes."""
PATTERN = "bad-samples-rank-*.jsonl"


class Listed(BaseModel):
    """A line of such a file."""

    split: Literal["train", "test"]
    sample: int = Field(ge=0)


@dataclass(kw_only=True)
class Faults:
    """What becomes of the samples of a split that cannot be read."""

    name: str = "the data"
    """What messages call the split."""
    split: str = "train"
    skips: bool = False
    """Whether they are left out (data.on_bad_sample=skip); else the first ends the run."""
    file: Path | None = None
    """Where those left out are listed, one line of JSON each."""
    warn: Callable[[str], None] = lambda _: None
    """Told of each once."""
    known: set[int] = field(default_factory=set)
    """Those that were left out so far."""

    def record(self, file: Path, warn: Callable[[str], None]) -> None:
        """From now on list those that are left out in a file, and tell of each."""
        self.file, self.warn, self.known = file, warn, set()

    def note(self, left_out: Mapping[int, str]) -> None:
        """List samples that were left out just now, each once."""
        for sample, reason in left_out.items():
            if sample in self.known:
                continue
            self.known.add(sample)
            self.warn(f"sample {sample} of {self.name} is left out: {reason}")
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                line = json.dumps({"split": self.split, "sample": sample, "reason": reason})
                with storage.append(self.file) as file:
                    file.write(line + "\n")


def file_of(logs: Path, rank: int) -> Path:
    """Where a rank lists what it has left out."""
    return logs / PATTERN.replace("*", str(rank))


def forget(logs: Path) -> None:
    """Remove the lists of an earlier run of this name."""
    for file in logs.glob(PATTERN):
        file.unlink(missing_ok=True)


def listed(logs: Path) -> dict[str, dict[str, Any]]:
    """What the ranks of a run have left out: split -> {"count", "indices": the first of them}; {} where nothing was."""
    found: dict[str, set[int]] = {}
    for file in logs.glob(PATTERN):
        with suppress(OSError), storage.regular(file) as opened:  # what else lies there by this name is no list
            for line in iter(partial(opened.readline, MOST_OF_A_LINE), b""):
                with suppress(ValueError):  # a kill may have torn the last
                    one = Listed.model_validate_json(line)
                    found.setdefault(one.split, set()).add(one.sample)
    return {
        split: {"count": len(samples), "indices": sorted(samples)[:MOST_NAMED]}
        for split, samples in sorted(found.items())
    }
