"""Samples that cannot be read: what happens to them, and the files that list them."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from lockstep.base import storage
from lockstep.base.errors import DataError
from lockstep.base.model_contracts import Batch, MicroBatch

MAX_IN_SUMMARY = 100
"""Samples named in the summary; the files name all."""
MAX_LINE_BYTES = 1 << 20
PATTERN = "bad-samples-rank-*.jsonl"


class BadSample(BaseModel):
    """Line of a file of left-out samples."""

    split: Literal["train", "test"]
    sample: int = Field(ge=0)


@dataclass(kw_only=True)
class Faults:
    """Handling of the samples of a split that cannot be read, or are not to be."""

    name: str = "the data"
    """Name of the split in messages."""
    split: str = "train"
    skips: bool = False
    """Whether they are left out (data.on_bad_sample=skip); otherwise the first one ends the run."""
    file: Path | None = None
    """JSON Lines file of the samples left out."""
    warn: Callable[[str], None] = lambda _: None
    """Called once for each sample left out."""
    outside: Callable[[Batch], tuple[int, str] | None] = lambda _: None
    """Micro-batch on the CPU -> the first sample whose target the model cannot give, and the reason; else None."""
    known: set[int] = field(default_factory=set)
    """Samples left out so far."""
    excluded: frozenset[int] = frozenset()
    """Samples that are left out without being read (data.exclude), of which no message tells."""

    def refuse_outside(self, micro_batch: MicroBatch) -> None:
        """Raise DataError, with the number of the sample, where `outside` finds one."""
        if micro_batch.indices and (wrong := self.outside(micro_batch.batch)):
            raise DataError(f"sample {micro_batch.indices[wrong[0]]} of {self.name}: {wrong[1]}")

    def excluded_of(self, samples: Sequence[int]) -> dict[int, str]:
        """Return those of these samples that are left out without being read, with the reason."""
        return {sample: "data.exclude" for sample in samples if sample in self.excluded}

    def record(self, file: Path, warn: Callable[[str], None]) -> None:
        """Start to list the samples left out in a file, and to warn of each."""
        self.file, self.warn, self.known = file, warn, set()

    def note(self, left_out: Mapping[int, str]) -> None:
        """List and warn of samples that were left out, each once."""
        for sample, reason in left_out.items():
            if sample in self.known or sample in self.excluded:
                continue
            self.known.add(sample)
            self.warn(f"sample {sample} of {self.name} is left out: {reason}")
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                line = json.dumps({"split": self.split, "sample": sample, "reason": reason})
                with storage.append(self.file) as file:
                    file.write(line + "\n")


def file_of(logs: Path, rank: int) -> Path:
    """Return the file in which a rank lists the samples it left out."""
    return logs / PATTERN.replace("*", str(rank))


def forget(logs: Path) -> None:
    """Remove the files of an earlier run of this name."""
    for file in logs.glob(PATTERN):
        file.unlink(missing_ok=True)


def listed(logs: Path) -> dict[str, dict[str, Any]]:
    """Summarise the files of all ranks: split -> {"count", "indices": the first ones}."""
    left_out: dict[str, set[int]] = {}
    for file in logs.glob(PATTERN):
        with suppress(OSError), storage.regular(file) as opened:  # skips what is not a regular file
            for line in iter(partial(opened.readline, MAX_LINE_BYTES), b""):
                with suppress(ValueError):  # a kill may have truncated the last line
                    bad = BadSample.model_validate_json(line)
                    left_out.setdefault(bad.split, set()).add(bad.sample)
    return {
        split: {"count": len(samples), "indices": sorted(samples)[:MAX_IN_SUMMARY]}
        for split, samples in sorted(left_out.items())
    }
