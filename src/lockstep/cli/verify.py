"""`lockstep verify`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import Trained, TrustCode, console


def command(
    path: Trained,
    segments: Annotated[int, typer.Option(help="Intervals to run again; 0 for none.", min=0)] = 3,
    seed: Annotated[int, typer.Option(help="Draw others.", min=0)] = 0,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Also from step 1 to the oldest checkpoint.")
    ] = False,
    sign: Annotated[
        Path | None, typer.Option(help="Then sign with this key: RUN/signature.json.", metavar="KEY")
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Check that signature.", metavar="PUBLIC_KEY")] = None,
    trust_code: TrustCode = False,
) -> int:
    """Show that a run's checkpoints, or an export, are the weights that its config and its data give.

    Reads every kept checkpoint and compares it with the hash chain in summary.json; then draws intervals between kept
    checkpoints, runs them again in a temporary folder, and compares the weights at their ends.

    Exits with 0 if all is as it should be, 1 if not, 2 if bits cannot be compared on this processor or torch.
    """
    from lockstep.tools.verify.verification import VerifyOptions, verify_run

    options = {"segments": segments, "seed": seed, "from_start": from_start, "sign": sign, "check": check}
    return verify_run(path, VerifyOptions(**options, trusts=trust_code), console=console)  # type: ignore[arg-type]
