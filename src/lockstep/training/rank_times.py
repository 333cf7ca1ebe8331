"""Where each rank's time goes, gathered on every logged step beside the steps that follow: no rank waits for it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.base.events import RankTimes
from lockstep.base.model_contracts import MicroBatch
from lockstep.core.host import phases
from lockstep.core.host.activity import waiting_in
from lockstep.core.host.memory_meter import device_peak_bytes


class RankClock:
    """Measures this rank, and gathers the figures of all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.clock = group, phases.start()
        self.before = self.clock.so_far()
        self.steps = self.micro_batches = 0
        """Since the last post."""
        self.posted: tuple[int, int, dist.Work | None, list[torch.Tensor]] | None = None
        """Step, number of steps, and the figures of each rank once the work is done."""

    def step_done(self, step: int, micro_batches: Sequence[MicroBatch], *, is_logged: bool) -> None:
        """Count a step; if it is logged, start to gather what was measured since the last such step. Collective."""
        self.steps, self.micro_batches = self.steps + 1, self.micro_batches + sum(not m.ghost for m in micro_batches)
        if not is_logged:
            return
        assert self.posted is None, "read the last figures first"
        now = self.clock.so_far()
        measured, self.before = now - self.before, now
        figures = [*measured.phases.values(), measured.delayed, float(self.micro_batches), float(device_peak_bytes())]
        own = torch.tensor(figures, dtype=torch.float64)
        size, work, gathered = self.group.size(), None, [own]
        if size > 1:
            gathered = [torch.empty_like(own) for _ in range(size)]
            work = dist.all_gather(gathered, own, group=self.group, async_op=True)
        self.posted = step, self.steps, work, gathered
        self.steps = self.micro_batches = 0

    def read(self) -> RankTimes | None:
        """The figures of the last post, once. Collective."""
        if self.posted is None:
            return None
        step, steps, work, gathered = self.posted
        self.posted = None
        if work is not None:
            with waiting_in("the times of all ranks"):
                work.wait()
        *seconds, delayed, micro_batches, memory = torch.stack(gathered).T.tolist()
        return RankTimes(
            step=step,
            steps=steps,
            seconds={name: tuple(values) for name, values in zip(phases.PHASES, seconds, strict=True)},
            delayed_seconds=tuple(delayed),
            micro_batches=tuple(map(int, micro_batches)),
            memory_bytes=tuple(map(int, memory)),
        )
