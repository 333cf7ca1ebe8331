"""Checks of the user's code during the first steps of training."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.base.errors import ModelError, few
from lockstep.base.model_contracts import MicroBatch
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.modules.buffers import WATCHED_STEPS
from lockstep.recipe.components import Components
from lockstep.training import gradient_watch
from lockstep.training.findings import Finding
from lockstep.training.gradient_watch import GradientWatch


class UserCodeChecks:
    """Finds what makes the weights depend on the number of processes, and warns of it. All ranks run it alike."""

    def __init__(self, parts: Components, warn: Callable[[str], None]) -> None:
        self.parts, self.warn = parts, warn
        self.findings: list[Finding] | None = None
        """Findings, the same on every rank; None where nothing was checked."""

    @property
    def world_size_dependence(self) -> str | None:
        """Why the weights depend, or may depend, on the number of processes; None where they do not."""
        findings = (finding.message for finding in self.findings or () if finding.leaves_promise)
        return self.parts.world_size_dependence or next(findings, None)

    @property
    def dependence_between_runs(self) -> str | None:
        """Why two runs of a step may differ though no process computes wrongly. What differs with the process only may
        come of a process that does."""
        findings = (each.message for each in self.findings or () if each.leaves_promise and each.kind != "process")
        return self.parts.world_size_dependence or next(findings, None)

    def summary(self) -> dict[str, Any]:
        """Return the findings for summary.json."""
        findings = None if self.findings is None else [finding.plain() for finding in self.findings]
        return {"findings": findings, "digest_depends_on_world": self.world_size_dependence}

    def steps(self, start: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step from `start` on, running the checks in between."""
        for number, micro_batches in enumerate(self.parts.steps(start)):
            if number == 0:
                self._check_micro_batch(micro_batches[0])
                gradients = GradientWatch(self.parts.state.module, self.parts.state.optimizer)
            if number == WATCHED_STEPS:
                self._check_buffers()
            if number == gradient_watch.STEPS:
                self._check_gradients(gradients)
            yield micro_batches

    def _check_micro_batch(self, micro_batch: MicroBatch) -> None:
        self.findings = self.parts.check_user_code(micro_batch)
        gc.collect()  # its cycles hold tensors: a tenth of a small GPT's memory, until Python collects by itself
        for finding in self.findings or ():
            if finding.kind == "parameter":  # also one that is written to through .data, past autograd
                raise ModelError(finding.message)
            self.warn(finding.message)
        if self.world_size_dependence and not self.parts.world_size_dependence:
            self.warn("so the weights may depend on the number of processes: lockstep prove looks further")

    def _check_buffers(self) -> None:
        """Warn of buffers that the first steps changed in a way that differs with the number of processes."""
        own = [note for update in self.parts.strategy.buffer_updates for note in update.notes]
        for sentence in dict.fromkeys(note for rank in all_gather_object(own) for note in rank):
            self.findings = [*(self.findings or ()), Finding(kind="buffer", where="a buffer", message=sentence)]
            self.warn(sentence)

    def _check_gradients(self, watch: GradientWatch) -> None:
        """Warn of parameters that no loss has reached on any rank, and that are not held back on purpose."""
        unreached = watch.finish()
        ranks = all_gather_object(({*watch.names.values()}, unreached))
        reached = set[str](self.parts.state.held).union(*(names.difference(own) for names, own in ranks))
        if names := sorted({name for _, own in ranks for name in own} - reached):
            self.warn(
                f"{few(names)} had no gradient in the first {gradient_watch.STEPS} steps: the loss does not depend on "
                "them, or only through what autograd does not follow (detach(), .data, argmax, reentrant checkpoints "
                "of inputs without gradients); leave them out of the model, or freeze them with model.freeze"
            )
