"""Predicts a whole file or folder with several processes; keeps the order, and resumes a command that was ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from lockstep.inference.predict import output_files
from lockstep.inference.predict.chunk_worker import ChunkTask, PredictOptions
from lockstep.inference.predict.input_rows import (
    CHAT,
    CHUNK_ROWS,
    InputScan,
    PredictionInput,
    is_words,
    open_input,
    scan_input,
    serialize,
)
from lockstep.inference.predict.output_files import ChunkFiles
from lockstep.inference.predict.worker_pool import CommandProcess, WorkerPool
from lockstep.inference.trained_model import resolve, trained_on
from lockstep.observe import progress_bar


def predict(options: PredictOptions, console: Console) -> None:
    """Predict every row of the input, and write the output when all are done. Raises UserError, early where it can be
    known; PeerLost if processes die repeatedly; Interrupted after Ctrl-C or SIGTERM. The same command then resumes."""
    if remote_path.is_url(str(options.out)):
        raise DataError(f"--out {options.out} is a URL: write to a file on this machine, and copy that")
    output_files.writer_of(options.out)
    options = replace(options, model=here(options.model), input=here(options.input))
    model = resolve(options.model)
    modality, column, messages = trained_on(model)
    if options.text_column is not None:
        column, messages = options.text_column, None
    source = open_input(options.input, column, modality, out=options.out, messages_column=messages)
    if options.out.exists() and options.out.samefile(options.input):
        raise DataError(f"{options.out} is the input, which is not overwritten: name another --out")
    gpus = torch.cuda.device_count() if options.device == "cuda" else None
    if gpus == 0:
        raise LaunchError("there is no GPU that torch can use here: leave --device out")
    kind = CommandProcess if source.is_short() else WorkerPool
    files = ChunkFiles(options.out.with_name(f"{options.out.name}.parts"))
    task = ChunkTask(
        options=options,
        model=model,
        device=torch.device(options.device),
        column=source.column,
        has_files=source.modality != "text",
        output=files.folder,
    )

    def say(message: str) -> None:
        if message:
            console.print(message, soft_wrap=True)

    pool = kind(task, options.processes or gpus or cores(), say)
    with ended_by_sigterm(), files.locked(), pool, _resumable(files, options):
        _predict(source, files, pool, console=console)


@contextmanager
def _resumable(files: ChunkFiles, options: PredictOptions) -> Iterator[None]:
    """Add to errors what is done so far."""

    def hint() -> str:
        done = len(files.names())
        chunks = f"{done:,} chunks are" if done > 1 else "1 chunk is"
        return f"\n{chunks} done and kept in {files.folder}: the same command goes on from there" if done else ""

    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted{hint()}") from None
    except LockstepError as error:
        raise type(error)(f"{error}{hint()}") from error.__cause__
    except OSError as error:
        raise DataError(f"cannot write to {options.out.parent}: {error.strerror}{hint()}") from error
    except pa.ArrowException as error:
        raise DataError(f"the rows of {options.input} cannot be put together: {error}{hint()}") from error


def _predict(source: PredictionInput, files: ChunkFiles, pool: WorkerPool, *, console: Console) -> None:
    """Scan the input, predict its chunks, write the output."""
    options = pool.task.options
    pool.start_worker()  # it opens the model during the scan
    with console.status(f"reading {options.input}"):
        scan = scan_input(source, lambda rows: output_files.check_rows(rows, options.out))
    with console.status(f"opening {options.model}"):
        model = pool.model_facts()
    schema = _schema(scan, model, options)
    done, message = files.resume(_facts(options, model, schema, text_column=source.column), scan.chunks)
    pool.report(message)
    speed = _predict_chunks(scan, done, pool, console=console)
    with console.status(f"writing {options.out}"):
        output_files.write(options.out, schema, files.tables(scan.chunks))
    files.clear()
    pool.report(f"{scan.rows:,} rows written to {options.out}{speed}")


def _predict_chunks(scan: InputScan, done: set[str], pool: WorkerPool, *, console: Console) -> str:
    """Predict the chunks that are not `done` -> the speed, as a message."""
    count = len(scan.chunks) - len(done)
    if not count:
        return ""
    rows_before = sum(chunk.rows for chunk in scan.chunks if chunk.file_name in done)
    processes = min(pool.size, count)
    where = f"{processes} process{'es' if processes > 1 else ''}, {pool.task.options.device}"
    pool.report(f"predicting {scan.rows - rows_before:,} rows of {pool.task.options.input} on {where}")
    requests = ((chunk, serialize(table)) for chunk, table in scan.read_again() if chunk.file_name not in done)
    with progress_bar.counting(console, "predicting", "rows", total=scan.rows, done=rows_before) as progress:
        pool.report_rows = progress.add
        pool.predict(requests, count)
    if cut := pool.cut_prompts:
        which, whose = ("prompts are", "their beginnings are") if cut > 1 else ("prompt is", "its beginning is")
        pool.report(f"{cut:,} {which} longer than the model's context: {whose} cut off")
    return f", {progress.speed:,.0f} rows/s"


def _schema(scan: InputScan, model: ExportFacts, options: PredictOptions) -> pa.Schema:
    """Return the output's schema. Raises UserError for another modality, columns that clash or cannot be written."""
    source = scan.input
    if ("text" if model.learned.GENERATES else model.modality) != source.modality:
        takes, holds = samples_of(model.modality), samples_of(source.modality)
        raise ConfigError(f"{model.title} takes {takes}, but {source.path} holds {holds}")
    if is_words(scan.schema.field(source.column).type) and not model.learned.WORDS:
        raise DataError(
            f"column {source.column!r} of {source.path} holds lists of words, but {model.title} takes whole texts: "
            "name another column with --text-column"
        )
    fields = options.fields(model)
    clash = next((field.name for field in fields if field.name in source.names.union(scan.schema.names)), None)
    if clash is not None:
        raise DataError(
            f"{source.path} has a column {clash!r} already: rename it there, or have the names of the new columns "
            "begin with something, such as --prefix predicted_"
        )
    schema = pa.schema([*(field for field in scan.schema if field.name != CHAT), *fields])
    output_files.check(schema, options.out)
    return schema


def _facts(options: PredictOptions, model: ExportFacts, schema: pa.Schema, *, text_column: str) -> dict[str, Any]:
    """Return everything besides the rows that the predictions depend on; the names appear in messages."""
    return {
        "model": model.model_dump(
            mode="json", include={"digest", "kind", "model", "labels", "numbers", "objective", "calibration"}
        ),
        "dtype": options.dtype or model.dtype,
        "device": options.device,
        "batch": options.batch,
        "columns": {field.name: str(field.type) for field in schema},
        "text column": text_column,
        **({"sampling": str(options.sampling)} if model.learned.GENERATES else {}),
        "size of chunks": CHUNK_ROWS,
        "version of torch": str(torch.__version__),
    }
