"""Checks that the model can be built for the data, and whether the processor has a faster precision for it."""

from collections.abc import Iterator

from lockstep.base.errors import LockstepError, ModelError
from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext, NotExamined

SCOPE = "config"


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    """Check the model's files, packages and code; texts cannot be opened without its tokenizer."""
    import torch  # noqa: PLC0415 (takes long)

    from lockstep.base import devices  # noqa: PLC0415 (torch)
    from lockstep.core.host.matmul_speed import faster_precision  # noqa: PLC0415 (torch)

    error = context.opened if isinstance(context.opened, ModelError) else context.built
    if isinstance(error, Exception) and not isinstance(error, NotExamined):
        yield Diagnosis.error(
            "LS-MODEL-01",
            str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}",
            "look at the model section of the config; `lockstep train CONFIG` shows where the error comes from",
        )
    if isinstance(context.built, int) and devices.count_gpus() == 0:
        cpu, precision = torch.device("cpu"), context.recipe.train.precision
        if faster := faster_precision(precision, cpu, parameters=context.built):
            yield Diagnosis.note("LS-MODEL-02", faster.partition(":")[0], faster.partition(": ")[2])
