"""Predicts a whole file or folder with several processes; keeps the order, and resumes a command that was ended."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from rich.console import Console

from lockstep.base import remote_path
from lockstep.base.contracts import samples_of
from lockstep.base.errors import ConfigError, DataError, Interrupted, LaunchError, LockstepError
from lockstep.base.world import cores
from lockstep.core.host.remote_storage import here
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.predict import output_writer
from lockstep.inference.predict.chunk_files import ChunkFiles
from lockstep.inference.predict.chunk_worker import ChunkRequest, ChunkTask, PredictedColumns
from lockstep.inference.predict.input_rows import CHAT, CHUNK_ROWS, PredictionInput, open_input, serialize
from lockstep.inference.predict.input_scan import InputScan, is_words, scan_input
from lockstep.inference.predict.worker_pool import CommandProcess, WorkerPool
from lockstep.inference.predictor import DTypeName
from lockstep.inference.trained_model import messages_column, modality_of, resolve, text_column
from lockstep.observe import progress_bar


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Arguments of `lockstep predict`."""

    model: Path
    """An export, a run or a checkpoint."""
    input: Path
    out: Path
    text_column: str | None = None
    """Column of the texts; by default that of the training."""
    prefix: str = ""
    """Prefix of the new columns' names."""
    has_probabilities: bool = False
    sampling: Sampling = Sampling(max_tokens=64, temperature=0, truncate=True)
    """Sampling of a language model."""
    processes: int | None = None
    """Number of processes; by default one for each core, or each GPU."""
    device: str = "cpu"
    dtype: DTypeName | None = None
    base: str | None = None
    """See open_predictor."""
    batch: int = 64


def predict(options: PredictOptions, console: Console) -> None:
    """Predict every row of the input, and write the output when all are done.

    Raises UserError for what cannot be read, used or written, before anything is predicted where that can be known;
    PeerLost if processes die repeatedly; Interrupted after Ctrl-C or SIGTERM. The same command then resumes.
    """
    if remote_path.is_url(str(options.out)):
        raise DataError(f"--out {options.out} is a URL: write to a file on this machine, and copy that")
    output_writer.writer_of(options.out)
    options = replace(options, model=here(options.model), input=here(options.input))
    model = resolve(options.model)
    column = options.text_column or text_column(model)
    messages = messages_column(model) if options.text_column is None else None
    source = open_input(options.input, column, modality_of(model), out=options.out, messages_column=messages)
    if options.out.exists() and options.out.samefile(options.input):
        raise DataError(f"{options.out} is the input, which is not overwritten: name another --out")
    processes = _processes(options)
    is_short = source.is_short()
    files = ChunkFiles(options.out.with_name(f"{options.out.name}.parts"))
    task = ChunkTask(
        model=model,
        device=torch.device(options.device),
        dtype=options.dtype,
        base=options.base,
        batch=options.batch,
        columns=PredictedColumns(
            source=source.column,
            has_chats=source.has_chats,
            prefix=options.prefix,
            has_probabilities=options.has_probabilities,
            takes_lists=options.out.suffix.lower() != ".csv",
            sampling=options.sampling,
        ),
        files=options.input if source.modality != "text" else None,
        output=files.folder,
    )
    kind = CommandProcess if is_short else WorkerPool
    pool = kind(task=task, size=processes, report=lambda text: console.print(text, soft_wrap=True))
    with ended_by_sigterm(), files.locked(), pool:
        try:
            BulkPrediction(options=options, source=source, files=files, pool=pool, console=console).run()
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted{_resume_hint(files)}") from None
        except LockstepError as error:
            raise type(error)(f"{error}{_resume_hint(files)}") from error.__cause__
        except OSError as error:
            raise DataError(f"cannot write to {options.out.parent}: {error.strerror}{_resume_hint(files)}") from error
        except pa.ArrowException as error:
            raise DataError(
                f"the rows of {options.input} cannot be put together: {error}{_resume_hint(files)}"
            ) from error


def _processes(options: PredictOptions) -> int:
    """Return the number of processes. Raises LaunchError where there is no GPU."""
    gpus = torch.cuda.device_count()
    if options.device == "cuda" and not gpus:
        raise LaunchError("there is no GPU that torch can use here: leave --device out")
    return options.processes or (gpus if options.device == "cuda" else cores())


def _resume_hint(files: ChunkFiles) -> str:
    done = files.count()
    chunks = f"{done:,} chunks are" if done > 1 else "1 chunk is"
    return f"\n{chunks} done and kept in {files.folder}: the same command goes on from there" if done else ""


@dataclass(frozen=True, kw_only=True)
class BulkPrediction:
    options: PredictOptions
    source: PredictionInput
    files: ChunkFiles
    pool: WorkerPool
    console: Console

    def run(self) -> None:
        """Scan the input, predict its chunks, write the output."""
        options = self.options
        self.pool.start_worker()  # it opens the model during the scan
        with self.console.status(f"reading {options.input}"):
            scan = scan_input(self.source)
        with self.console.status(f"opening {options.model}"):
            model = self.pool.model_facts()
        schema = self.schema(scan, model)
        done, message = self.files.resume(self.facts(model, schema), scan.chunks)
        self.print(message)
        speed = self.predict(scan, done)
        with self.console.status(f"writing {options.out}"):
            output_writer.write(options.out, schema, self.files.tables(scan.chunks))
        self.files.clear()
        self.print(f"{scan.rows:,} rows written to {options.out}{speed}")

    def predict(self, scan: InputScan, done: set[str]) -> str:
        """Predict the chunks that are not `done` -> the speed, as a message."""
        count = len(scan.chunks) - len(done)
        if not count:
            return ""
        rows_before = sum(chunk.rows for chunk in scan.chunks if chunk.file_name in done)
        processes = min(self.pool.size, count)
        where = f"{processes} process{'es' if processes > 1 else ''}, {self.options.device}"
        self.print(f"predicting {scan.rows - rows_before:,} rows of {self.options.input} on {where}")
        requests = (
            ChunkRequest(file_name=chunk.file_name, first_row=chunk.number * CHUNK_ROWS + 1, rows=serialize(table))
            for chunk, table in scan.read_again()
            if chunk.file_name not in done
        )
        with progress_bar.counting(self.console, "predicting", "rows", total=scan.rows, done=rows_before) as progress:
            self.pool.predict(requests, count, progress.add)
        if cut := self.pool.cut_prompts:
            which, whose = ("prompts are", "their beginnings are") if cut > 1 else ("prompt is", "its beginning is")
            self.print(f"{cut:,} {which} longer than the model's context: {whose} cut off")
        return f", {progress.speed:,.0f} rows/s"

    def schema(self, scan: InputScan, model: ExportFacts) -> pa.Schema:
        """Return the schema of the output. Raises UserError for a model of another modality, and for columns that clash
        or cannot be written."""
        source = self.source
        if ("text" if model.learned.GENERATES else model.modality) != source.modality:
            takes, holds = samples_of(model.modality), samples_of(source.modality)
            raise ConfigError(f"{model.title} takes {takes}, but {source.path} holds {holds}")
        if is_words(scan.schema.field(source.column).type) and not model.learned.WORDS:
            raise DataError(
                f"column {source.column!r} of {source.path} holds lists of words, but {model.title} takes whole texts: "
                "name another column with --text-column"
            )
        fields = self.pool.task.columns.fields(model)
        clash = next((field.name for field in fields if field.name in source.names.union(scan.schema.names)), None)
        if clash is not None:
            raise DataError(
                f"{source.path} has a column {clash!r} already: rename it there, or have the names of the new columns "
                "begin with something, such as --prefix predicted_"
            )
        schema = pa.schema([*(field for field in scan.schema if field.name != CHAT), *fields])
        output_writer.check(schema, self.options.out)
        return schema

    def facts(self, model: ExportFacts, schema: pa.Schema) -> dict[str, Any]:
        """Return everything besides the rows that the predictions depend on; the names appear in messages."""
        return {
            "model": model.model_dump(
                mode="json", include={"digest", "kind", "model", "labels", "numbers", "objective", "calibration"}
            ),
            "dtype": self.options.dtype or model.dtype,
            "device": self.options.device,
            "batch": self.options.batch,
            "columns": {field.name: str(field.type) for field in schema},
            "text column": self.source.column,
            **({"sampling": str(self.options.sampling)} if model.learned.GENERATES else {}),
            "size of chunks": CHUNK_ROWS,
            "version of torch": str(torch.__version__),
        }

    def print(self, message: str) -> None:
        if message:
            self.console.print(message, soft_wrap=True)
