"""The processes of `lockstep doctor`: each measures its processor, all measure the network between them."""

import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median

from lockstep.base.world import World
from lockstep.core.distributed import links
from lockstep.core.distributed.process_group import device_model, device_of
from lockstep.core.host.matmul_speed import mean_flops
from lockstep.core.host.signals import SignalWatch
from lockstep.core.numerics.precision import fix_numerics
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.doctor.doctor_context import ExaminationRequest, RankFacts

NEEDS_GROUP = True
ROUNDS = 3
"""Number of measurements of the processor, of which the median counts: another process may run for a moment."""


class ExaminationTask:
    def __init__(self, recipe: Recipe, world: World, *, request: ExaminationRequest) -> None:
        self.recipe, self.world, self.request = recipe, world, request

    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Measure; nothing is resumed."""
        device, is_first_here = device_of(self.world), self.world.local_rank == 0
        precision = self.recipe.train.precision
        fix_numerics(threads=self.recipe.run.threads, exact=False, precision=precision)
        facts = RankFacts(
            rank=self.world.rank,
            host=platform.node(),
            processor=device_model(device),
            flops=median(links.together(lambda: mean_flops(precision, device)) for _ in range(ROUNDS)),
            seconds=links.collective_seconds(device),
            links=links.by_pair(device),
            findings=self.request.findings if is_first_here else (),
        )
        self.recipe.folder.mkdir(parents=True, exist_ok=True)
        trials.write_result(self.recipe.folder, self.world.rank, facts)
        links.together(lambda: None)  # node 0 reads the facts once its own processes have ended

    def watching(self) -> AbstractContextManager[object]:
        """Watch nothing: no process waits for another for long."""
        return nullcontext()

    def close(self) -> None:
        """Release nothing."""


def build(recipe: Recipe, world: World, signals: SignalWatch, *, request: Path, began: float) -> ExaminationTask:
    """Build the task from its request file."""
    return ExaminationTask(recipe, world, request=ExaminationRequest.model_validate_json(request.read_bytes()))
