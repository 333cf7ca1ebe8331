"""The checkpoints that the run would resume from."""

from collections.abc import Iterator
from pathlib import Path

from lockstep.base.errors import LockstepError
from lockstep.checkpoint import layout
from lockstep.observe.run_folder import RunFolder
from lockstep.recipe import recipe as recipes
from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext
from lockstep.training import resume

SCOPE = "config"
FACTOR = 2.0
"""Number of saves that a grace period has to allow: one at the end of a run waits for the one before it."""


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    if context.recipe.run.name is None:
        return
    found = layout.listed(context.recipe.folder / "checkpoints")
    if found and (reason := resume.problem(found[0])) is not None:
        yield Diagnosis(
            code="LS-CKPT-01",
            severity="warning" if len(found) > 1 else "error",
            cause=f"{found[0]} {reason}",
            repair="a resume takes the next older one" if len(found) > 1 else "remove it, and start anew",
        )
    elif found:
        yield from _drift(context, found[0])
    yield from too_short(context, context.recipe.folder)


def _drift(context: DoctorContext, checkpoint: Path) -> Iterator[Diagnosis]:
    try:
        now = recipes.numeric_recipe(context.recipe, {})
        before = layout.read_manifest(checkpoint).numeric
    except (LockstepError, OSError, ValueError):
        return
    known = {name: value for name, value in before.items() if name in now}
    if differing := layout.differences(known, {name: now[name] for name in known}):
        names = "; ".join(layout.described(*each) for each in differing[:3])
        yield Diagnosis.error(
            "LS-CKPT-02",
            f"{checkpoint} was made with other settings: {names}",
            "set them back, choose another run.name, or resume with --allow-drift",
        )


def too_short(context: DoctorContext, folder: Path) -> Iterator[Diagnosis]:
    """Check that the saves of the run in a folder took no longer than the grace period allows."""
    lines = RunFolder(folder).history()
    seconds = max((line.seconds for line in lines if line.kind == "saved"), default=0.0)
    if FACTOR * seconds > context.launch.grace_seconds:
        yield Diagnosis.error(
            "LS-CKPT-03",
            f"a save took {seconds:.0f} s, and launch.grace_seconds is {context.launch.grace_seconds}: "
            "a run that is asked to stop may have to wait for one save and make another",
            f"set launch.grace_seconds={2 * round(FACTOR * seconds)}",
        )
