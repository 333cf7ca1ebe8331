"""Predicts a whole file or folder: several processes, order kept, and a command that was ended goes on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from rich.console import Console

from lockstep.base.contracts import samples_of
from lockstep.base.errors import ConfigError, DataError, Interrupted, LaunchError, LockstepError
from lockstep.base.world import cores
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.predict import output_writer
from lockstep.inference.predict.chunk_worker import ChunkTask, Columns, Work
from lockstep.inference.predict.input_rows import ROWS, Input, opened, packed
from lockstep.inference.predict.input_scan import InputScan, survey
from lockstep.inference.predict.output_parts import OutputParts
from lockstep.inference.predict.worker_pool import WorkerPool
from lockstep.inference.predictor import DTypeName
from lockstep.inference.trained_model import fixed
from lockstep.observe import progress_bar


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """What is to be predicted, with what, and how."""

    model: Path
    """An export, a run or a checkpoint."""
    input: Path
    out: Path
    text_column: str = "text"
    prefix: str = ""
    """Of the names of new columns."""
    has_probabilities: bool = False
    processes: int | None = None
    """By default one for each core, or each GPU."""
    device: str = "cpu"
    dtype: DTypeName | None = None
    batch: int = 64
    trusts: bool = False
    """Whether the user has said that the model's own code may be executed, whatever it is."""


def predict(wish: PredictOptions, console: Console) -> None:
    """Predict every row of the input, and write the output when all are.

    Raises UserError for what cannot be read, used or written, before anything is predicted where that can be known;
    PeerLost when processes die again and again; Interrupted after Ctrl-C or SIGTERM. The same command then goes on.
    """
    output_writer.writer_of(wish.out)
    source = opened(wish.input, wish.text_column)
    if wish.out.exists() and wish.out.samefile(wish.input):
        raise DataError(f"{wish.out} is the input, which is not overwritten: name another --out")
    size = _processes(wish)
    parts = OutputParts(wish.out.with_name(f"{wish.out.name}.parts"))
    task = ChunkTask(
        model=fixed(wish.model),
        device=torch.device(wish.device),
        dtype=wish.dtype,
        batch=wish.batch,
        columns=Columns(source=source.column, prefix=wish.prefix, has_probabilities=wish.has_probabilities),
        images=wish.input if source.modality == "image" else None,
        parts=parts.folder,
        trusts=wish.trusts,
    )
    crew = WorkerPool(task=task, size=size, tell=lambda text: console.print(text, soft_wrap=True))
    with ended_by_sigterm(), parts.held(), crew:
        try:
            Bulk(wish=wish, source=source, parts=parts, crew=crew, console=console).run()
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted{_kept(parts)}") from None
        except LockstepError as error:
            raise type(error)(f"{error}{_kept(parts)}") from error.__cause__
        except OSError as error:
            raise DataError(f"cannot write to {wish.out.parent}: {error.strerror}{_kept(parts)}") from error
        except pa.ArrowException as error:
            raise DataError(f"the rows of {wish.input} cannot be put together: {error}{_kept(parts)}") from error


def _processes(wish: PredictOptions) -> int:
    """How many at most; raises LaunchError where there is no GPU."""
    gpus = torch.cuda.device_count()
    if wish.device == "cuda" and not gpus:
        raise LaunchError("there is no GPU that torch can use here: leave --device out")
    return wish.processes or (gpus if wish.device == "cuda" else cores())


def _kept(parts: OutputParts) -> str:
    done = parts.count()
    what = f"{done:,} chunks are" if done > 1 else "1 chunk is"
    return f"\n{what} done and kept in {parts.folder}: the same command goes on from there" if done else ""


@dataclass(frozen=True, kw_only=True)
class Bulk:
    """One command's work, and what it is done with."""

    wish: PredictOptions
    source: Input
    parts: OutputParts
    crew: WorkerPool
    console: Console

    def run(self) -> None:
        """From the look at the input to the output."""
        wish = self.wish
        self.crew.hire()  # it opens the model while the input is looked at
        with self.console.status(f"reading {wish.input}"):
            found = survey(self.source)
        with self.console.status(f"opening {wish.model}"):
            model = self.crew.opened()
        schema = self.schema(found, model)
        done, said = self.parts.settle(self.facts(found, model), found.chunks)
        self.say(said)
        speed = self.predict(found, done)
        with self.console.status(f"writing {wish.out}"):
            output_writer.write(wish.out, schema, self.parts.tables(found.chunks))
        self.parts.clear()
        self.say(f"{found.rows:,} rows written to {wish.out}{speed}")

    def predict(self, found: InputScan, done: set[str]) -> str:
        """Have what is not done yet done -> how fast, for a person."""
        todo = len(found.chunks) - len(done)
        if not todo:
            return ""
        before = sum(chunk.rows for chunk in found.chunks if chunk.part in done)
        processes = min(self.crew.size, todo)
        where = f"{processes} process{'es' if processes > 1 else ''}, {self.wish.device}"
        self.say(f"predicting {found.rows - before:,} rows of {self.wish.input} on {where}")
        work = (
            Work(part=chunk.part, first_row=chunk.number * ROWS + 1, rows=packed(table))
            for chunk, table in found.again()
            if chunk.part not in done
        )
        with progress_bar.counting(self.console, "predicting", "rows", total=found.rows, done=before) as count:
            for rows in self.crew.predict(work, todo):
                count.add(rows)
        return f", {count.speed:,.0f} rows/s"

    def schema(self, found: InputScan, model: ExportFacts) -> pa.Schema:
        """Of the output; raises UserError for a model that takes no such rows, columns that clash or cannot be
        written."""
        source = self.source
        if model.modality != source.modality:
            takes, holds = samples_of(model.modality), samples_of(source.modality)
            raise ConfigError(f"{model.title} takes {takes}, but {source.path} holds {holds}")
        if not model.labels:
            raise ConfigError(f"{model.title} has no labels: what can be predicted is which of its labels fits")
        added = self.crew.task.columns.added(model.labels)
        clash = next((field.name for field in added if field.name in found.schema.names), None)
        if clash is not None:
            raise DataError(
                f"{source.path} has a column {clash!r} already: rename it there, or have the names of the new columns "
                "begin with something, such as --prefix predicted_"
            )
        schema = pa.schema([*found.schema, *added])
        output_writer.check(schema, self.wish.out)
        return schema

    def facts(self, found: InputScan, model: ExportFacts) -> dict[str, Any]:
        """All that the predictions depend on beside the rows, by names that a person knows."""
        added = self.crew.task.columns.added(model.labels)
        return {
            "model": model.model_dump(mode="json", include={"digest", "kind", "model", "labels", "calibration"}),
            "dtype": self.wish.dtype or model.dtype,
            "device": self.wish.device,
            "batch": self.wish.batch,
            "columns": {field.name: str(field.type) for field in [*found.schema, *added]},
            "text column": self.source.column,
            "size of chunks": ROWS,
            "version of torch": str(torch.__version__),
        }

    def say(self, text: str) -> None:
        """A line for a person, if there is anything to say."""
        if text:
            self.console.print(text, soft_wrap=True)
