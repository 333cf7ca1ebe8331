"""The data and its loader."""

from collections.abc import Iterator

from lockstep.base.contracts import Source
from lockstep.base.errors import LockstepError, ModelError
from lockstep.base.world import cores
from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext

SCOPE = "config"
PROBES = 8
"""Number of samples to read, spread over a split."""


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    error = context.opened
    if isinstance(error, ModelError):  # which the check of the model reports
        return
    if isinstance(error, Exception):
        yield Diagnosis.error(
            "LS-DATA-01",
            str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}",
            "`lockstep data CONFIG` opens it alone; docs/your-own.md says what a source has to be",
        )
        return
    for name, source in (("training", context.splits.train), ("test", context.splits.test)):
        if (text := _read_problem(source)) is not None:
            yield Diagnosis(
                code="LS-DATA-02",
                severity="note" if context.recipe.data.skips else "error",
                cause=f"{name} split: {text}",
                repair="mend it; with data.on_bad_sample=skip a run leaves such samples out and lists them",
            )
    loaders = context.recipe.data.workers * context.processes
    if loaders and loaders + context.processes > 2 * cores():
        yield Diagnosis.warning(
            "LS-DATA-03",
            f"{loaders} loader processes and {context.processes} ranks share {cores()} cores",
            f"set data.workers={max(0, cores() // context.processes - 1)}",
        )


def _read_problem(source: Source) -> str | None:
    """Read some samples -> why the first unreadable one cannot be read; None if all can."""
    for number in sorted({len(source) * probe // PROBES for probe in range(PROBES)}):
        try:
            source.__getitems__([number])
        except Exception as error:  # whatever the user's code raises
            return f"sample {number} cannot be read ({type(error).__name__}: {error})"
    return None
