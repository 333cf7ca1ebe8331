"""The division of a step among processes."""

from collections.abc import Iterator

from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext

SCOPE = "config"
SMALL = 0.25
"""Share of a whole step under which the last one is small."""


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    train, processes = context.recipe.train, context.processes * context.launch.max_nodes
    shards = train.shards
    if processes > shards:
        yield Diagnosis.warning(
            "LS-CFG-01",
            f"a step has {shards} micro-batches for {processes} processes: {processes - shards} of them wait",
            f"lower train.micro_batch to {max(1, train.global_batch // processes)}, or launch.processes",
        )
    elif shards % processes:
        most, least = -(-shards // processes), shards // processes
        yield Diagnosis.note(
            "LS-CFG-02",
            f"{shards} micro-batches among {processes} processes: some run {most}, some {least} and wait",
            f"let train.global_batch / train.micro_batch be a multiple of {processes}",
        )
    samples = len(context.splits.train)
    rest = samples % train.global_batch
    if samples > train.global_batch and 0 < rest < SMALL * train.global_batch:
        yield Diagnosis.note(
            "LS-CFG-03",
            f"the last step of an epoch has {rest} of {train.global_batch} samples, and weighs as much as others",
            "choose a train.global_batch that divides the samples better, or leave it so",
        )
