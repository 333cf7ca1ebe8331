"""Checks that the model can be built for the data."""

from collections.abc import Iterator

from lockstep.base.errors import LockstepError, ModelError
from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext, NotExamined

SCOPE = "config"
CODES = ("LS-MODEL-01",)


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    """Check the model's files, packages and code; texts cannot be opened without its tokenizer."""
    error = context.opened if isinstance(context.opened, ModelError) else context.built
    if isinstance(error, Exception) and not isinstance(error, NotExamined):
        yield Diagnosis.error(
            "LS-MODEL-01",
            str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}",
            "look at the model section of the config; `lockstep train CONFIG` shows where the error comes from",
        )
