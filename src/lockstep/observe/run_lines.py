"""The lines of a run's history.jsonl and metrics.jsonl, and the one way to read them.

A kill may have cut one short, or the run may be somebody else's: a line that Lockstep would not write is left out, and
counted. A file of any size is read in linear time, and no line longer than MOST_LINE_BYTES is held.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from lockstep.base import storage

MOST_BYTES = 1 << 30
"""Size limit of a file."""
MOST_LINES = 1_000_000
"""Limit of the lines that are read at a time."""
MOST_LINE_BYTES = 1 << 20
MOST_CHARACTERS = 2000
"""Length limit of a message; the rest is cut off."""
SPIKE = "spike"
"""Kind of a line of metrics.jsonl that repeats values, for which it is in no curve."""
STRICT = ConfigDict(strict=True, allow_inf_nan=False)

Step = Annotated[int, Field(ge=0, le=10**12)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
"""Also a time since 1970: until the year 5138, so that every time zone has a date for it."""
Figure = Annotated[float, Field(ge=0, le=1e9)]
Message = Annotated[str, AfterValidator(lambda text: text[:MOST_CHARACTERS])]
Name = Annotated[str, Field(max_length=200)]
L = TypeVar("L")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class HistoryLine:
    """A line of history.jsonl; which values it has depends on its kind."""

    time: Seconds
    """Seconds since 1970."""
    kind: (
        Literal["started", "steps", "ranks", "evaluated", "texts", "saved", "steered"]
        | Literal["spiked", "regrouped", "warned", "ended"]
    )
    step: Step
    seconds: Seconds = 0.0
    stall_seconds: Seconds = 0.0
    memory_bytes: Count = 0
    world_size: Count = 1
    device: Name = ""
    total_steps: Step = 0
    steps_per_epoch: Step = 0
    steps: Step = 0
    ranks: tuple[Count, ...] = ()
    phases: dict[str, tuple[Seconds, ...]] = Field(default_factory=dict)
    """Phase -> seconds of each of the ranks."""
    memory_by_rank: tuple[Count, ...] = ()
    gpus: dict[str, tuple[Figure, ...]] = Field(default_factory=dict)
    """Figure from the GPU's driver -> value of each of the ranks."""
    message: Message = ""
    status: Name = ""
    texts: tuple[tuple[str, str], ...] = ()
    """Prompts, each with the text that a language model generated after it."""


class MetricLine(BaseModel):
    """A line of metrics.jsonl: these, and values by name, None where one was not finite."""

    model_config = STRICT | ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    kind: Literal["step", "evaluation", "spike"]
    step: Step
    epoch: Step = 0
    samples: Count = 0
    chain: Name | None = None

    @property
    def values(self) -> dict[str, float | None]:
        return self.__pydantic_extra__


HISTORY, METRIC = TypeAdapter(HistoryLine), TypeAdapter(MetricLine)


class Lines(Generic[L]):
    """The lines of a file, in their order; none where there is no file, or none that can be read."""

    def __init__(self, path: Path, kind: TypeAdapter[L], notes: list[str]) -> None:
        """`notes` gets sentences on what was left out, once all have been read."""
        self.path, self.kind, self.notes = path, kind, notes
        self.damaged, self.size, self.is_cut = 0, 0, False
        """Number of damaged lines, bytes of the last line, and whether there are more lines than were read."""

    def __iter__(self) -> Iterator[L]:
        try:
            with opened(self.path) as file:
                for text in islice(short_lines(file), MOST_LINES):
                    if (line := self.parsed(text)) is not None:
                        yield line
                self.is_cut = bool(file.read(1))
        except FileNotFoundError:
            pass
        except OSError as error:
            self.notes.append(f"{self.path.name} cannot be read: {error.strerror}")
        finally:
            self.notes += self.left_out

    def parsed(self, text: bytes) -> L | None:
        """Parse a line; None where it is damaged."""
        self.size = len(text)
        with suppress(ValidationError):
            return self.kind.validate_json(text)
        self.damaged += 1
        return None

    @property
    def left_out(self) -> list[str]:
        """Sentences for the user on what was left out so far."""
        found, name = [], self.path.name
        if self.damaged:
            lines = f"{self.damaged:,} line{'s' if self.damaged > 1 else ''} of {name}"
            found.append(f"{lines} left out: cut short, too long, or not as Lockstep writes them")
        return found + [f"{name} is longer than what is read of it: its end is left out"] * self.is_cut


def opened(path: Path) -> BufferedReader:
    """Open a file of a run. Raises OSError also for a link, which may lead out of the folder, and for a huge file."""
    file = storage.regular(path, follows_links=False)
    if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
        file.close()
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {MOST_BYTES:,}", str(path))
    return file


def short_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines from here on; an empty one in place of each that is too long."""
    while line := file.readline(MOST_LINE_BYTES):
        is_long = False
        while len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            is_long, line = True, file.readline(MOST_LINE_BYTES)
        yield b"\n" if is_long else line
