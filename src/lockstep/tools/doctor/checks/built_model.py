"""Checks that the model can be built for the data."""

from collections.abc import Iterator

from lockstep.base.errors import LockstepError, ModelError
from lockstep.tools.doctor.diagnosis import Diagnosis
from lockstep.tools.doctor.doctor_context import DoctorContext, NotExamined

SCOPE = "config"
CODES = {"LS-MODEL-01": "the model cannot be built"}


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    """Check the model's files, packages and code; texts cannot be opened without its tokenizer."""
    error = context.opened.error if isinstance(context.opened.error, ModelError) else context.parameters.error
    if error is not None and not isinstance(error, NotExamined):
        yield Diagnosis.error(
            "LS-MODEL-01",
            str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}",
            "look at the model section of the config; `lockstep train CONFIG` shows where the error comes from",
        )
