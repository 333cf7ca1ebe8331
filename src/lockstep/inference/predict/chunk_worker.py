"""A worker process: opens the model, then predicts one chunk after another until there are none left."""

import json
import os
import signal
import sys
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
from lockstep.core.host import deferred_imports
from lockstep.core.numerics.precision import fix_numerics
from lockstep.core.numerics.word_tokens import joined
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.generation.generator import Completion, Generator
from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.predict.input_rows import CHAT, Chunk, deserialize
from lockstep.inference.predictor import DTypeName, Predictor, Sample
from lockstep.inference.trained_model import open_predictor
from lockstep.models.objectives._objective import PredictingObjective, finite

COMPLETION = "completion"
"""Column that a language model adds."""
Message = ExportFacts | tuple[int, int] | LockstepError | None
"""Message of a worker: the model's facts once it is open; then for each chunk the number of rows predicted since the
last message, with that of prompts of which the model has read only the end, and None at its end; or an error that would
occur in any other process, too."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    model: Path
    """An export, a run or a checkpoint."""
    input: Path
    out: Path
    text_column: str | None = None
    """Column of the texts; by default that of the training."""
    prefix: str = ""
    has_probabilities: bool = False
    """Whether to add a column for each class."""
    sampling: Sampling = Sampling(max_tokens=64, temperature=0, truncate=True)
    """Sampling of a language model, which adds a column of completions."""
    processes: int | None = None
    """Number of processes; by default one for each core, or each GPU."""
    device: str = "cpu"
    dtype: DTypeName | None = None
    base: str | None = None
    """See open_predictor."""
    batch: int = 64

    def fields(self, facts: ExportFacts) -> list[pa.Field]:
        """Return the fields of the new columns. Raises ModelError for a model that does not predict samples."""
        objective = facts.learned
        if objective.GENERATES:
            return [pa.field(f"{self.prefix}{COMPLETION}", pa.string())]
        if not isinstance(objective, PredictingObjective):
            raise ModelError(f"{facts.title} has neither labels nor numbers to predict")
        none = self.columns(facts, objective.blank(0, facts.spec), [])
        return [pa.field(name, column.type) for name, column in none.items()]

    def columns(self, facts: ExportFacts, scores: np.ndarray, texts: list[str]) -> dict[str, pa.Array]:
        """Return the new columns for the scores of texts, or of files by their paths."""
        assert isinstance(facts.learned, PredictingObjective)
        found = facts.learned.columns(scores, facts.spec, texts=texts, every=self.has_probabilities)
        return {f"{self.prefix}{name}": self._arrow(column, facts.learned.JOINED) for name, column in found.items()}

    def _arrow(self, column: np.ndarray, separator: str) -> pa.Array:
        """Return a column; several labels of a sample are a list, or one text in CSV, which has no lists."""
        if column.dtype != object:
            return pa.array(column)
        if separator and self.out.suffix.lower() != ".csv":
            return pa.array([*column], pa.list_(pa.string()))
        return pa.array([separator.join(labels) for labels in column] if separator else column, pa.string())


@dataclass(frozen=True, kw_only=True)
class ChunkTask:
    options: PredictOptions
    model: Path
    """Folder of an export or a checkpoint."""
    device: torch.device
    column: str
    """Column of texts, of files' paths, or CHAT."""
    has_files: bool
    output: Path
    trust: tuple[str, ...] = field(default_factory=trust.arguments)


def run_worker(task: ChunkTask, pipe: Connection) -> None:
    end_with_parent("SIGKILL")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent handles it
    try:
        trust.accept(task.trust)
        opened = open_model(task, pipe.send)
        pipe.send(opened.model.facts)
        while (request := pipe.recv()) is not None:
            opened.predict(*request)
    except (EOFError, ConnectionError):  # the parent has gone
        sys.exit(1)
    except Exception as error:
        pipe.send(explanation(error, task))


def open_model(task: ChunkTask, send: Callable[[Message], object]) -> "ChunkModel":
    """Open the model with one thread for kernels and tokenizers, deterministic kernels on a GPU. Raises UserError."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else each process starts as many threads as there are cores
    fix_numerics(threads=1, exact=True)
    deferred_imports.install()  # transformers imports it, unless it was preloaded
    model = open_predictor(task.model, device=task.device, dtype=task.options.dtype, base=task.options.base)
    return ChunkModel(model=model, task=task, send=send)


def explanation(error: Exception, task: ChunkTask) -> LockstepError:
    """Return the error to report for an exception that opening a model or predicting raised."""
    if isinstance(error, LockstepError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return ModelError(f"the GPU has no memory for {task.options.batch} rows at a time: lower --batch")
    return SampleError(f"the model cannot be used:\n{user_code.format_traceback(error)}")


@dataclass(frozen=True, kw_only=True)
class ChunkModel:
    """A model that adds columns to the rows of a chunk."""

    model: Predictor | Generator
    task: ChunkTask
    send: Callable[[Message], object]

    def predict(self, chunk: Chunk, rows: bytes) -> None:
        """Predict a chunk, a serialized table, and write it. Raises ModelError for predictions that are not finite,
        DataError for a damaged file, and for a full disk."""
        table = deserialize(rows)
        values = table.column(self.task.column).to_pylist()
        values = [value if isinstance(value, str) else joined(value) for value in values]  # words
        if CHAT in table.column_names:
            table = table.drop_columns([CHAT])
        columns = self._completed if isinstance(self.model, Generator) else self._predicted
        for name, column in columns(self.model, values, chunk.first_row).items():  # type: ignore[arg-type]
            table = table.append_column(name, column)
        buffer = pa.BufferOutputStream()
        parquet.write_table(table, buffer, compression="zstd")
        try:
            storage.write(self.task.output / chunk.file_name, buffer.getvalue().to_pybytes())
        except OSError as error:
            raise DataError(f"cannot write to {self.task.output}: {error.strerror}") from None
        self.send(None)

    def _completed(self, generator: Generator, values: list[str], first_row: int) -> dict[str, pa.Array]:
        texts, options = [], self.task.options
        for start in range(0, len(values), options.batch):
            rows = enumerate(values[start : start + options.batch], first_row + start)
            made = generator.finish([self._completion(generator, value, row) for row, value in rows])
            texts += [each.text for each in made]
            self.send((len(made), sum(each.is_truncated for each in made)))
        return {f"{options.prefix}{COMPLETION}": pa.array(texts, pa.string())}

    def _completion(self, generator: Generator, value: str, row: int) -> Completion:
        """Begin the completion of a row. Raises DataError."""
        sampling = self.task.options.sampling
        chat: dict[str, Any] = json.loads(value) if self.task.column == CHAT else {"messages": value, "tools": None}
        try:
            return generator.completion(
                chat["messages"], replace(sampling, seed=sampling.seed + row, tools=chat["tools"])
            )
        except DataError as error:
            raise DataError(f"row {row}: {error}") from None

    def _predicted(self, predictor: Predictor, values: list[str], first_row: int) -> dict[str, pa.Array]:
        scores, options = predictor.objective.blank(len(values), predictor.facts.spec), self.task.options
        for rows, samples in self._batches(predictor, values):
            scores[rows] = predictor.scores(samples)
            self.send((len(rows), 0))
        is_finite = finite(scores)
        if not is_finite.all():
            raise ModelError(
                f"row {first_row + int(is_finite.argmin())} gives numbers that are not finite in "
                f"{options.dtype or predictor.facts.dtype}: use another --dtype"
            )
        return options.columns(predictor.facts, scores, values)

    def _batches(self, predictor: Predictor, values: list[str]) -> Iterator[tuple[np.ndarray, list[Sample]]]:
        """Yield row numbers and encoded samples, texts of similar length together to save padding."""
        numbers, encoded = np.arange(len(values)), list[Sample]()
        if not self.task.has_files:
            encoded = predictor.encode(values)
            numbers = np.argsort([len(sample) for sample in encoded], kind="stable")
        for start in range(0, len(values), self.task.options.batch):
            rows = numbers[start : start + self.task.options.batch]
            if encoded:
                yield rows, [encoded[row] for row in rows]
            else:  # not all at once: a chunk of photos would take gigabytes
                yield rows, predictor.encode([self.task.options.input / values[row] for row in rows])
