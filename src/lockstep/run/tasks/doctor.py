"""The processes of `lockstep doctor`: each measures its processor, all measure the network between them."""

import platform
from statistics import median

from lockstep.core.distributed import links
from lockstep.core.distributed.process_group import device_model
from lockstep.core.host.matmul_speed import mean_flops
from lockstep.core.numerics.precision import fix_numerics
from lockstep.run.tasks._task import Task
from lockstep.tools import trials
from lockstep.tools.doctor.doctor_context import ExaminationRequest, RankFacts

NEEDS_GROUP = True
ROUNDS = 3
"""Number of measurements of the processor, of which the median counts: another process may run for a moment."""


class ExaminationTask(Task):
    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Measure; nothing is resumed."""
        device, precision = self.device, self.recipe.train.precision
        fix_numerics(threads=self.recipe.run.threads, exact=False, precision=precision)
        facts = RankFacts(
            rank=self.world.rank,
            host=platform.node(),
            processor=device_model(device),
            flops=median(links.together(lambda: mean_flops(precision, device)) for _ in range(ROUNDS)),
            seconds=links.collective_seconds(device),
            links=links.by_pair(device),
            findings=self.asked(ExaminationRequest).findings if self.world.local_rank == 0 else (),
        )
        self.recipe.folder.mkdir(parents=True, exist_ok=True)
        trials.write_result(self.recipe.folder, self.world.rank, facts)
        links.together(lambda: None)  # node 0 reads the facts once its own processes have ended


build = ExaminationTask
