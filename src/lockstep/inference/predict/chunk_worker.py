"""A worker process: opens the model, then predicts one chunk after another until there are none left."""

import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from lockstep.base import storage, trust, user_code
from lockstep.base.errors import DataError, LockstepError, ModelError, SampleError
from lockstep.base.lifetime import end_with_parent
from lockstep.core.numerics.precision import fix_numerics
from lockstep.core.numerics.word_tokens import joined
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.generation.generator import Completion, Generator
from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.predict.input_rows import CHAT, deserialize
from lockstep.inference.predictor import DTypeName, Predictor, Sample
from lockstep.inference.trained_model import open_predictor
from lockstep.models.objectives._objective import PredictingObjective, finite

COMPLETION = "completion"
"""Column that a language model adds."""


@dataclass(frozen=True, kw_only=True)
class PredictedColumns:
    """Column that is predicted, and columns that are added."""

    source: str
    """Column of texts or of files' paths."""
    has_chats: bool = False
    """Whether the texts are chats, as JSON."""
    prefix: str = ""
    """Prefix of the new columns' names."""
    has_probabilities: bool = False
    """Whether to add a column for each class."""
    takes_lists: bool = True
    """Whether the output can hold several labels of a sample as a list; else they are joined in a text."""
    sampling: Sampling = Sampling(max_tokens=64, temperature=0, truncate=True)
    """Sampling of a language model, which adds a column of completions."""

    def added(self, facts: ExportFacts, scores: np.ndarray, texts: list[str]) -> dict[str, pa.Array]:
        """Return the new columns for the scores of texts, or of files by their paths."""
        assert isinstance(facts.learned, PredictingObjective)
        found = facts.learned.columns(scores, facts.spec, texts=texts, every=self.has_probabilities)
        separator = facts.learned.JOINED
        return {f"{self.prefix}{name}": self._arrow(column, separator) for name, column in found.items()}

    def _arrow(self, column: np.ndarray, separator: str) -> pa.Array:
        if column.dtype != object:
            return pa.array(column)
        if not separator:
            return pa.array(column, pa.string())
        if self.takes_lists:
            return pa.array([*column], pa.list_(pa.string()))
        return pa.array([separator.join(labels) for labels in column], pa.string())

    def fields(self, facts: ExportFacts) -> list[pa.Field]:
        """Return the fields of the new columns. Raises ModelError for a model that does not predict samples."""
        objective = facts.learned
        if objective.GENERATES:
            return [pa.field(f"{self.prefix}{COMPLETION}", pa.string())]
        if not isinstance(objective, PredictingObjective):
            raise ModelError(f"{facts.title} has neither labels nor numbers to predict")
        none = self.added(facts, objective.blank(0, facts.spec), [])
        return [pa.field(name, column.type) for name, column in none.items()]


@dataclass(frozen=True, kw_only=True)
class ChunkTask:
    """Arguments of a worker at its start."""

    model: Path
    device: torch.device
    dtype: DTypeName | None
    base: str | None
    """See open_predictor."""
    batch: int
    columns: PredictedColumns
    files: Path | None
    """Folder that paths of images or sounds are relative to; None for texts."""
    output: Path
    """Folder that predictions are written to."""
    trust: tuple[str, ...] = field(default_factory=trust.arguments)


@dataclass(frozen=True, kw_only=True)
class ChunkRequest:
    file_name: str
    """Name of the file of its predictions."""
    first_row: int
    """Number of its first row in the input, from 1."""
    rows: bytes
    """Serialized table."""


@dataclass(frozen=True, kw_only=True)
class ChunkDone:
    """The predictions of the current chunk are written."""


@dataclass(frozen=True, kw_only=True)
class PromptsCut:
    """Number of prompts of which the model has read only the end."""

    count: int


@dataclass(frozen=True, kw_only=True)
class WorkerError:
    """An error that would occur in any other process, too."""

    kind: type[LockstepError]
    message: str


Message = ExportFacts | int | PromptsCut | ChunkDone | WorkerError
"""Message of a worker: the model's facts once it is open; then for each chunk the number of rows predicted since the
last message, the number of prompts cut, and its end."""


def run_worker(task: ChunkTask, pipe: Connection) -> None:
    """Main function of a worker process."""
    end_with_parent("SIGKILL")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent handles it
    try:
        trust.accept(task.trust)
        table = open_table(task, pipe.send)
        pipe.send(table.model.facts)
        while (request := pipe.recv()) is not None:
            table.predict(request)
    except (EOFError, ConnectionError):  # the parent has gone
        sys.exit(1)
    except Exception as error:
        explained = explanation(error, task)
        pipe.send(WorkerError(kind=type(explained), message=str(explained)))


def open_table(task: ChunkTask, send: Callable[[Message], None]) -> "ChunkTable":
    """Open the model on one core. Raises UserError."""
    _use_one_core()
    model = open_predictor(task.model, device=task.device, dtype=task.dtype, base=task.base)
    if isinstance(model, Generator):
        return ChunkCompleter(model=model, task=task, send=send)
    return ChunkPredictor(model=model, task=task, send=send)


def explanation(error: Exception, task: ChunkTask) -> LockstepError:
    """Return the error to report for an exception that opening a model or predicting raised."""
    if isinstance(error, LockstepError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return ModelError(f"the GPU has no memory for {task.batch} rows at a time: lower --batch")
    return SampleError(f"the model cannot be used:\n{user_code.format_traceback(error)}")


def _use_one_core() -> None:
    """Set one thread for kernels and for tokenizers, deterministic kernels on a GPU; before any computation."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else each process starts as many threads as there are cores
    fix_numerics(threads=1, exact=True)


@dataclass(frozen=True, kw_only=True)
class ChunkTable(ABC):
    """Adds columns to the rows of a chunk."""

    model: Predictor | Generator
    task: ChunkTask
    send: Callable[[Message], None]

    @abstractmethod
    def columns(self, values: list[str], first_row: int) -> dict[str, pa.Array]:
        """Return the new columns for texts, or paths. Raises ModelError for predictions that are not finite, DataError
        for a damaged file."""

    def predict(self, request: ChunkRequest) -> None:
        """Predict a chunk and write it. Raises ModelError, and DataError also for a full disk."""
        table = deserialize(request.rows)
        values = [_text(value) for value in table.column(self.task.columns.source).to_pylist()]
        if CHAT in table.column_names:
            table = table.drop_columns([CHAT])
        for name, column in self.columns(values, request.first_row).items():
            table = table.append_column(name, column)
        buffer = pa.BufferOutputStream()
        parquet.write_table(table, buffer, compression="zstd")
        try:
            storage.write(self.task.output / request.file_name, buffer.getvalue().to_pybytes())
        except OSError as error:
            raise DataError(f"cannot write to {self.task.output}: {error.strerror}") from None
        self.send(ChunkDone())


def _text(value: str | list[str]) -> str:
    """Return a text, or a list of words as one text."""
    return value if isinstance(value, str) else joined(value)


@dataclass(frozen=True, kw_only=True)
class ChunkCompleter(ChunkTable):
    """Completes texts with a language model."""

    model: Generator

    def columns(self, values: list[str], first_row: int) -> dict[str, pa.Array]:
        texts, task = [], self.task
        for start in range(0, len(values), task.batch):
            rows = enumerate(values[start : start + task.batch], first_row + start)
            made = self.model.finish([self._completion(value, row) for row, value in rows])
            texts += [each.text for each in made]
            self.send(len(made))
            if cut := sum(each.is_truncated for each in made):
                self.send(PromptsCut(count=cut))
        return {f"{task.columns.prefix}{COMPLETION}": pa.array(texts, pa.string())}

    def _completion(self, value: str, row: int) -> Completion:
        """Begin the completion of a row. Raises DataError."""
        columns = self.task.columns
        sampling = replace(columns.sampling, seed=columns.sampling.seed + row)
        chat: dict[str, Any] = json.loads(value) if columns.has_chats else {"messages": value, "tools": None}
        try:
            return self.model.completion(chat["messages"], replace(sampling, tools=chat["tools"]))
        except DataError as error:
            raise DataError(f"row {row}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ChunkPredictor(ChunkTable):
    """Predicts with a model that has scores for each sample."""

    model: Predictor

    def columns(self, values: list[str], first_row: int) -> dict[str, pa.Array]:
        scores = self.model.objective.blank(len(values), self.model.facts.spec)
        for rows, samples in self._batches(values):
            scores[rows] = self.model.scores(samples)
            self.send(len(rows))
        is_finite = finite(scores)
        if not is_finite.all():
            raise ModelError(
                f"row {first_row + int(is_finite.argmin())} gives numbers that are not finite in "
                f"{self.task.dtype or self.model.facts.dtype}: use another --dtype"
            )
        return self.task.columns.added(self.model.facts, scores, values)

    def _batches(self, values: list[str]) -> Iterator[tuple[np.ndarray, list[Sample]]]:
        """Yield row numbers and encoded samples, texts of similar length together to save padding."""
        numbers, folder, read = np.arange(len(values)), self.task.files, self.model.reader
        if folder is None or read is None:
            encoded = self.model.encode(values)
            numbers = np.argsort([len(sample) for sample in encoded], kind="stable")
        for start in range(0, len(values), self.task.batch):
            rows = numbers[start : start + self.task.batch]
            if folder is None or read is None:
                yield rows, [encoded[row] for row in rows]
            else:  # not all at once: a chunk of photos would take gigabytes
                yield rows, [read(folder / values[row], str(folder / values[row])) for row in rows]
