"""`lockstep gate`."""

from contextlib import chdir
from pathlib import Path
from typing import Annotated

import typer

from lockstep.base.errors import ConfigError
from lockstep.cli._common import Overrides, TrustCode, console, load_trusted
from lockstep.protocol import environment


def command(
    path: Annotated[Path, typer.Argument(help="A golden file; with --record, a config.", metavar="GOLDEN|CONFIG")],
    overrides: Overrides = None,
    record: Annotated[Path | None, typer.Option(help="Write this golden file, from the config's first steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps to record; default: 20.", min=1, max=1000)] = None,
    within: Annotated[
        int | None, typer.Option(help="Accept numbers that differ by so many ULPs of float32.", min=0, metavar="ULPS")
    ] = None,
    trust_code: TrustCode = False,
) -> int:
    """Check that the first steps of a training give the bits of a golden file, else say where they differ first.

    Record it from a config by --record. Exit code 0: the same bits; 1: others; 2: they cannot be compared.
    """
    if record is not None:
        recipe = load_trusted(path, overrides, trusts=trust_code)
        from lockstep.tools.gate import gating

        gating.record(recipe, path, record, overrides=overrides or [], steps=steps or 20, console=console)
        return 0
    if steps is not None:
        raise ConfigError("--steps belongs to --record: a golden file says how many steps it has")
    from lockstep.base import devices, trust
    from lockstep.recipe import recipe as recipes
    from lockstep.recipe import recipe_trust
    from lockstep.tools.gate import golden_file

    golden = golden_file.read(path)
    folder = path.absolute().parent / golden.folder
    if not folder.is_dir():
        raise ConfigError(f"{path} was recorded in {folder}, which is not there; record it again by --record")
    with chdir(folder):
        recipe = recipes.load(Path(golden.config), [*golden.overrides, *(overrides or [])])
        trust.authorize(recipe_trust.executable_code(recipe), trusts=trust_code, folder=path.absolute().parent)
        devices.choose(recipe.run.device, shares_gpus=recipe.launch.share_gpus)
        environment.set_threads(recipe.run.threads)
        from lockstep.tools.gate import gating

        return gating.check(golden, recipe, within=within, console=console)
