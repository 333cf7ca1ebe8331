"""A few steps of the run, on its own processes and on one: whether they work, have the same bits, and save in time."""

from collections.abc import Iterator

from lockstep.tools.doctor.checks.folder_of_runs import existing
from lockstep.tools.doctor.checks.newest_checkpoint import too_short
from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext
from lockstep.tools.prove.proof_runs import ProofRequest, ProofRuns, train_samples
from lockstep.tools.trials import processes_text, temporary_folder

SCOPE = "training"
STEPS = 3
"""Number of steps: two whole ones and a ragged one, an epoch of a proof."""
SHOWN_LINES = 6


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    """Train a few steps. Raises NotExamined where the data cannot be opened or the model cannot be built."""
    recipe, splits, _ = context.recipe, context.splits, context.parameters
    request = ProofRequest(
        train_samples=train_samples(recipe, len(splits.train)),
        test_samples=min(len(splits.test), recipe.train.micro_batch),
    )
    with temporary_folder(".lockstep-doctor-", inside=existing(recipe.run.dir)) as folder:
        runs = ProofRuns(recipe=recipe, folder=folder, steps=STEPS, request=request, report=lambda _: None)
        digests = {}
        for number in sorted({context.processes, 1}, reverse=True):
            run = runs.ended(f"on-{number}", number)
            if run.code:
                lines = run.output.strip().splitlines() or ["they wrote nothing"]
                yield Diagnosis.error(
                    "LS-STEP-01",
                    f"the first steps on {processes_text(number)} ended with exit code {run.code}",
                    "\n    ".join(lines[-SHOWN_LINES:]),
                )
                return
            digests[number] = run.digest
            if number == context.processes:
                yield from too_short(context, run.folder)
    if len(set(digests.values())) > 1:
        yield Diagnosis.warning(
            "LS-STEP-02",
            f"after {STEPS} steps the weights on 1 and on {context.processes} processes are not the same bits",
            "`lockstep prove CONFIG` says which part of the model, data or loss is the cause",
        )
