"""A worker process: opens the model, then predicts one chunk after another until there are none left."""

import os
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
from lockstep.base.lifetime import end_with_parent
from lockstep.core.numerics.precision import fix_numerics
from lockstep.data.images import pixels_of
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.predict.input_rows import deserialize
from lockstep.inference.predictor import DTypeName, Predictor, Sample
from lockstep.inference.trained_model import open_predictor


@dataclass(frozen=True, kw_only=True)
class PredictedColumns:
    """The column that is predicted, and the columns that are added."""

    source: str
    """The column of texts or image paths."""
    prefix: str = ""
    """Of the new columns' names."""
    has_probabilities: bool = False
    """Whether to add a column for each class."""

    def fields(self, labels: tuple[str, ...]) -> list[pa.Field]:
        """The new columns."""
        each = [f"probability_{label}" for label in labels] if self.has_probabilities else []
        names = {"label": pa.string(), **dict.fromkeys(["confidence", *each], pa.float32())}
        return [pa.field(f"{self.prefix}{name}", kind) for name, kind in names.items()]

    def append_to(self, table: pa.Table, labels: tuple[str, ...], probabilities: np.ndarray) -> pa.Table:
        """The table with the new columns; probabilities are float32 [rows, classes]."""
        values = [[labels[best] for best in probabilities.argmax(axis=1)], probabilities.max(axis=1)]
        values += [*probabilities.T] if self.has_probabilities else []
        for field, column in zip(self.fields(labels), values, strict=True):
            table = table.append_column(field, pa.array(column))
        return table


@dataclass(frozen=True, kw_only=True)
class ChunkTask:
    """What a worker is given at its start."""

    model: Path
    device: torch.device
    dtype: DTypeName | None
    batch: int
    columns: PredictedColumns
    images: Path | None
    """The folder that image paths are relative to; None for texts."""
    output: Path
    """The folder that predictions are written to."""
    trusts: bool = False
    """Whether to execute the model's own code even if it is unknown."""


@dataclass(frozen=True, kw_only=True)
class ChunkRequest:
    """A chunk to predict."""

    file_name: str
    """Of its predictions."""
    first_row: int
    """Number of its first row in the input, from 1."""
    rows: bytes
    """The serialized table."""


@dataclass(frozen=True, kw_only=True)
class ChunkDone:
    """The predictions of the current chunk are written."""


@dataclass(frozen=True, kw_only=True)
class WorkerError:
    """An error that would occur in any other process, too."""

    kind: type[LockstepError]
    message: str


Message = ExportFacts | int | ChunkDone | WorkerError
"""What a worker sends: the model's facts once it is open; then for each chunk the number of rows predicted since the
last message, and that it is done."""


def run_worker(task: ChunkTask, pipe: Connection) -> None:
    """Main function of a worker process."""
    end_with_parent("SIGKILL")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent handles it
    try:
        _use_one_core()
        if task.trusts:
            trust.allow_all()
        predictor = open_predictor(task.model, device=task.device, dtype=task.dtype)
        pipe.send(predictor.facts)
        chunk_predictor = ChunkPredictor(predictor=predictor, task=task, send=pipe.send)
        while (request := pipe.recv()) is not None:
            chunk_predictor.predict(request)
    except (EOFError, ConnectionError):  # the parent has gone
        sys.exit(1)
    except torch.OutOfMemoryError:
        message = f"the GPU has no memory for {task.batch} rows at a time: lower --batch"
        pipe.send(WorkerError(kind=ModelError, message=message))
    except LockstepError as error:
        pipe.send(WorkerError(kind=type(error), message=str(error)))
    except Exception as error:
        message = f"the model cannot be used:\n{user_code.format_traceback(error)}"
        pipe.send(WorkerError(kind=SampleError, message=message))


def _use_one_core() -> None:
    """One thread for kernels and for tokenizers, deterministic kernels on a GPU; before anything is computed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else each process starts as many threads as there are cores
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not be deterministic
    fix_numerics(threads=1, exact=True)


@dataclass(frozen=True, kw_only=True)
class ChunkPredictor:
    predictor: Predictor
    task: ChunkTask
    send: Callable[[Message], None]

    def predict(self, request: ChunkRequest) -> None:
        """Predict a chunk and write it. Raises ModelError for probabilities that are not finite, DataError for a
        damaged image and a full disk."""
        table, labels = deserialize(request.rows), self.predictor.labels
        probabilities = np.empty((table.num_rows, len(labels)), dtype=np.float32)
        for rows, samples in self._batches(table.column(self.task.columns.source).to_pylist()):
            probabilities[rows] = self.predictor.probabilities(samples)
            self.send(len(rows))
        finite = np.isfinite(probabilities).all(axis=1)
        if not finite.all():
            raise ModelError(
                f"row {request.first_row + int(finite.argmin())} gives probabilities that are not finite in "
                f"{self.task.dtype or self.predictor.facts.dtype}: use another --dtype"
            )
        buffer = pa.BufferOutputStream()
        parquet.write_table(self.task.columns.append_to(table, labels, probabilities), buffer, compression="zstd")
        try:
            storage.write(self.task.output / request.file_name, buffer.getvalue().to_pybytes())
        except OSError as error:
            raise DataError(f"cannot write to {self.task.output}: {error.strerror}") from None
        self.send(ChunkDone())

    def _batches(self, values: list[str]) -> Iterator[tuple[np.ndarray, list[Sample]]]:
        """Row numbers and encoded samples, texts of similar length together to save padding."""
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
