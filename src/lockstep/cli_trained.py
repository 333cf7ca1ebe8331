"""What you type once a model has been trained: evaluate, export, serve, predict."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep import using
from lockstep.evaluate import evaluating
from lockstep.inference.predictor import DTypeName
from lockstep.predict import bulk
from lockstep.predict.tables import ROWS
from lockstep.serving import server
from lockstep.serving.settings import Settings
from lockstep.terminal import Overrides, RunArgument, TrustCode, console, honest

Model = Annotated[Path, typer.Argument(help="A run's folder, one of its checkpoints, or an export.", metavar="MODEL")]
DType = Annotated[DTypeName | None, typer.Option(help="What the weights become; default: as they are.")]


@honest
def evaluate(
    target: Model,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    file: Annotated[
        Path | None, typer.Option(help="Measure on this table, or folder of images, in place of a split.")
    ] = None,
    worst: Annotated[int, typer.Option(help="How many of the worst samples to show.", min=0)] = 20,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Fit a temperature, and keep it.")] = False,
    to: Annotated[
        Path | None, typer.Option(help="Folder for what comes out; default: the run's, the export's.")
    ] = None,
    trust_code: TrustCode = False,
) -> int:
    """Measure a run's best or newest checkpoint, or an export: every sample once, on any number of processes.

    Writes evaluation.json and evaluation.html: figures, each class, the confusion matrix, how far confidences can be
    believed, and the samples that the model is most wrong about.
    """
    wishes = evaluating.Wishes(split=split, file=file, worst=worst, calibrates=calibrate, to=to, trusts=trust_code)
    return evaluating.evaluate(target, overrides or [], wishes, console=console)


@honest
def export(
    run: RunArgument,
    overrides: Overrides = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder to write; default: export, or export-KIND, in the run's folder.")
    ] = None,
    space: Annotated[
        bool, typer.Option("--space", help="Write a Hugging Face Space with it; default folder: space.")
    ] = False,
    trust_code: TrustCode = False,
) -> None:
    """Write a run's model for others to load, read it back and compare: export.kind says in which form."""
    using.settle(run, overrides, trusts=trust_code)
    with console.status("exporting"):
        facts, target = (using.export_space if space else using.export)(run, overrides, to)
    assert facts.agreement is not None
    console.print(f"exported step {facts.step} to {target}; {facts.agreement.words(facts.dtype)}", soft_wrap=True)


@honest
def predict(
    model: Model,
    source: Annotated[
        Path,
        typer.Argument(help="A .csv, .tsv, .jsonl, .parquet or .txt file, or a folder of images.", metavar="INPUT"),
    ],
    out: Annotated[Path, typer.Option(help="File to write: .parquet, .csv or .jsonl.")],
    processes: Annotated[
        int | None, typer.Option(help="That predict at the same time; default: one for each core, or GPU.", min=1)
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model runs.")] = "cpu",
    dtype: DType = None,
    batch: Annotated[int, typer.Option(help="Rows at a time.", min=1, max=ROWS)] = 64,
    text_column: Annotated[str, typer.Option(help="The column of texts, in a table.")] = "text",
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add a column for each class.")] = False,
    prefix: Annotated[str, typer.Option(help="What the names of the new columns begin with.")] = "",
    trust_code: TrustCode = False,
) -> None:
    """Predict a whole file, or folder of images: its rows and columns, with `label` and `confidence` added.

    The output is the same, byte for byte, for any number of processes. What is done lies in OUT.parts until all is: the
    same command goes on where it was ended.
    """
    wish = bulk.Wish(
        model=model,
        input=source,
        out=out,
        processes=processes,
        device=device,
        dtype=dtype,
        batch=batch,
        text_column=text_column,
        has_probabilities=probabilities,
        prefix=prefix,
        trusts=using.settle(model, (), trusts=trust_code),
    )
    bulk.predict(wish, console)


@honest
def serve(
    target: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.", min=0, max=65535)] = 8000,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: DType = None,
    max_batch: Annotated[int, typer.Option(help="Inputs predicted together at most.", min=1)] = 32,
    max_wait_ms: Annotated[float, typer.Option(help="How long the first of a batch waits for others.", min=0)] = 0,
    queue: Annotated[int, typer.Option(help="Inputs that may wait; beyond it: 503.", min=1)] = 1024,
    timeout: Annotated[float, typer.Option(help="Seconds for a request; beyond it: 504.", min=0.1)] = 30,
    max_body_mb: Annotated[float, typer.Option(help="Size of a request; beyond it: 413.", min=0.001)] = 8,
    drain: Annotated[float, typer.Option(help="Seconds for what has come, after SIGTERM.", min=0)] = 20,
    api_key: Annotated[
        str | None, typer.Option(help="Wanted as Authorization: Bearer KEY.", envvar="LOCKSTEP_API_KEY")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Answer POST /predict with a model's labels, and show a page to try it on.

    SIGHUP, or POST /-/reload from this machine, loads it anew; SIGTERM and Ctrl-C answer what has come, then end.
    """
    settings = Settings(
        host=host,
        port=port,
        max_batch=max_batch,
        max_wait_seconds=max_wait_ms / 1000,
        queue=queue,
        timeout_seconds=timeout,
        body_bytes=round(max_body_mb * 2**20),
        drain_seconds=drain,
        api_key=api_key,
    )
    using.settle(target, (), trusts=trust_code)
    load = using.loader(target, device=device, dtype=dtype)
    server.serve(load, settings, lambda line: console.print(line, soft_wrap=True))


COMMANDS = (evaluate, export, predict, serve)
