"""What a process that predicts does: opens the model, then takes a chunk after the other until there is none left."""

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from lockstep.base import storage, trust, user_code
from lockstep.base.errors import DataError, LockstepError, ModelError, SampleError
from lockstep.core.host.lifetime import end_with_parent
from lockstep.data.images import pixels_of
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.predict.deterministic import be_lone
from lockstep.inference.predict.input_rows import unpacked
from lockstep.inference.predictor import DTypeName, Predictor, Sample
from lockstep.inference.trained_model import open_predictor


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is predicted from which column, and how what is added is called."""

    source: str
    """The column of texts or files."""
    prefix: str = ""
    """Of the new columns' names."""
    has_probabilities: bool = False
    """Whether there is a column for each class."""

    def added(self, labels: tuple[str, ...]) -> list[pa.Field]:
        each = [f"probability_{label}" for label in labels] if self.has_probabilities else []
        names = {"label": pa.string(), **dict.fromkeys(["confidence", *each], pa.float32())}
        return [pa.field(f"{self.prefix}{name}", kind) for name, kind in names.items()]

    def filled(self, labels: tuple[str, ...], probabilities: np.ndarray) -> Iterator[tuple[pa.Field, pa.Array]]:
        """The new ones with their values; probabilities are float32 [m, classes]."""
        values = [
            pa.array([labels[best] for best in probabilities.argmax(axis=1)]),
            pa.array(probabilities.max(axis=1)),
        ]
        each = [pa.array(column) for column in probabilities.T] if self.has_probabilities else []
        yield from zip(self.added(labels), [*values, *each], strict=True)


@dataclass(frozen=True, kw_only=True)
class ChunkTask:
    """What a process is told at its start."""

    model: Path
    device: torch.device
    dtype: DTypeName | None
    batch: int
    columns: Columns
    images: Path | None
    """The folder that paths of images begin in; None for texts."""
    parts: Path
    """The folder that predictions are written to."""
    trusts: bool = False
    """Whether the model's own code may be executed, whatever it is."""


@dataclass(frozen=True, kw_only=True)
class Work:
    part: str
    """Name of the file to write."""
    first_row: int
    """Number of its first row in the input, from 1."""
    rows: bytes
    """Packed."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """The predictions of a chunk are written."""

    part: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """An error that another process would meet as well."""

    kind: type[LockstepError]
    text: str


Message = ExportFacts | int | Done | Failed
"""What a process sends: the facts of the model once it is open, then, for each chunk, how many more rows are predicted,
and that it is done."""


def work(task: ChunkTask, pipe: Connection) -> None:
    """Be such a process, to the end."""
    end_with_parent("SIGKILL")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent answers it
    try:
        be_lone()
        if task.trusts:
            trust.allow_all()
        predictor = open_predictor(task.model, device=task.device, dtype=task.dtype)
        pipe.send(predictor.facts)
        desk = ChunkPredictor(predictor=predictor, task=task, tell=pipe.send)
        while (order := pipe.recv()) is not None:
            desk.do(order)
    except (EOFError, ConnectionError):  # the parent has gone
        sys.exit(1)
    except torch.OutOfMemoryError:
        pipe.send(Failed(kind=ModelError, text=f"the GPU has no room for {task.batch} rows at a time: lower --batch"))
    except LockstepError as error:
        pipe.send(Failed(kind=type(error), text=str(error)))
    except Exception as error:
        pipe.send(Failed(kind=SampleError, text=f"the model cannot be used:\n{user_code.format_traceback(error)}"))


@dataclass(frozen=True, kw_only=True)
class ChunkPredictor:
    predictor: Predictor
    task: ChunkTask
    tell: Callable[[Message], None]

    def do(self, order: Work) -> None:
        """Predict a chunk and write it. Raises ModelError where an outcome is no number, DataError for a bad image
        and a full disk."""
        table, labels = unpacked(order.rows), self.predictor.labels
        probabilities = np.empty((table.num_rows, len(labels)), dtype=np.float32)
        for rows, samples in self._batches(table.column(self.task.columns.source).to_pylist()):
            probabilities[rows] = self.predictor.probabilities(samples)
            self.tell(len(rows))
        finite = np.isfinite(probabilities).all(axis=1)
        if not finite.all():
            raise ModelError(
                f"row {order.first_row + int(finite.argmin())} gives probabilities that are not finite in "
                f"{self.task.dtype or self.predictor.facts.dtype}: use another --dtype"
            )
        for field, column in self.task.columns.filled(labels, probabilities):
            table = table.append_column(field, column)
        buffer = pa.BufferOutputStream()
        parquet.write_table(table, buffer, compression="zstd")
        try:
            storage.write(self.task.parts / order.part, buffer.getvalue().to_pybytes())
        except OSError as error:
            raise DataError(f"cannot write to {self.task.parts}: {error.strerror}") from None
        self.tell(Done(part=order.part))

    def _batches(self, values: list[str]) -> Iterator[tuple[np.ndarray, list[Sample]]]:
        """Numbers of rows, and what the model takes of them: texts of like length together, which are little padded."""
        numbers, images = np.arange(len(values)), self.task.images
        if images is None:
            encoded = self.predictor.encode(values)
            numbers = np.argsort([len(sample) for sample in encoded], kind="stable")
        for start in range(0, len(values), self.task.batch):
            rows = numbers[start : start + self.task.batch]
            if images is None:
                yield rows, [encoded[row] for row in rows]
            else:  # not all at once: a chunk of photos would take gigabytes
                yield rows, [self._pixels(images / values[row]) for row in rows]

    def _pixels(self, file: Path) -> Sample:
        shape = self.predictor.facts.image_shape
        assert shape is not None
        return pixels_of(file, str(file), shape)
