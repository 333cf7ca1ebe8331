"""`lockstep export`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import Overrides, RunArgument, TrustCode, console


def command(
    run: RunArgument,
    overrides: Overrides = None,
    to: Annotated[
        Path | None,
        typer.Option(help="Folder to write, or a URL; default: export, or export-KIND, in the run's folder."),
    ] = None,
    space: Annotated[
        bool, typer.Option("--space", help="Write a Hugging Face Space with it; default folder: space.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(help="Upload the folder to the Hugging Face hub.", metavar="OWNER/NAME")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: create a private repository.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Write a run's model for others to load, read it back and compare: export.kind says in which form.

    --push needs a token that may write: HF_TOKEN, or `hf auth login`. It uploads everything as one commit.
    """
    from lockstep.run import api

    with console.status("exporting") if push is None else nullcontext():  # the upload has bars of its own
        done = api.export(
            run, *(overrides or []), to=to, space=space, push=push, private=private, trust_code=trust_code
        )
    facts, target = done.facts, done.space or done.folder
    assert facts.agreement is not None
    console.print(f"exported step {facts.step} to {target}; {facts.agreement.summary(facts.dtype)}", soft_wrap=True)
    if done.url is not None:
        console.print(f"{'copied' if push is None else 'pushed'} to {done.url}", soft_wrap=True)
