"""`lockstep predict`."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli._common import Base, DType, Trained, TrustCode, console


def command(
    model: Trained,
    source: Annotated[
        Path,
        typer.Argument(
            help="A .csv, .tsv, .jsonl, .parquet or .txt file, or a folder of images or sounds.", metavar="INPUT"
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write: .parquet, .csv or .jsonl.")],
    processes: Annotated[
        int | None, typer.Option(help="Processes that predict in parallel; default: one per core or GPU.", min=1)
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model runs.")] = "cpu",
    dtype: DType = None,
    batch: Annotated[int, typer.Option(help="Rows at a time.", min=1, max=512)] = 64,
    text_column: Annotated[
        str | None, typer.Option(help="The column of texts, in a table; default: as in training.")
    ] = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add a column for each class.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest completion of a language model.", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="Of a language model; 0 takes the most probable token.", min=0)
    ] = 0.0,
    date: Annotated[
        datetime | None,
        typer.Option(help="The day that a chat template is told; default: the day it is.", formats=["%Y-%m-%d"]),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Prefix of the names of new columns.")] = "",
    base: Base = None,
    trust_code: TrustCode = False,
) -> None:
    """Predict a whole file, or folder of images or sounds: its rows and columns, with those of the prediction added.

    A classifier adds `label` and `confidence`, a regression its number, a language model `completion`.

    The output is the same, byte for byte, for any number of processes. Finished parts are kept in OUT.parts until all
    are done: the same command resumes there.
    """
    from lockstep.inference import trained_model
    from lockstep.inference.generation.sampling import Sampling
    from lockstep.inference.predict import bulk

    trained_model.authorize(model, (), trusts=trust_code)
    options = bulk.PredictOptions(
        model=model,
        input=source,
        out=out,
        processes=processes,
        device=device,
        dtype=dtype,
        base=base,
        batch=batch,
        text_column=text_column,
        has_probabilities=probabilities,
        sampling=Sampling(
            max_tokens=max_tokens, temperature=temperature, date=date.date() if date else None, truncate=True
        ),
        prefix=prefix,
    )
    bulk.predict(options, console)
