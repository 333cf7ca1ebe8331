"""Steps of training that are run once more, each shard by another rank, before their update (observe.recheck).

All shards of a step are run again, not some in each of many steps: ranks wait for each other, so that one further shard
makes a step as much longer as one for each rank.
"""

import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.base.errors import Corruption
from lockstep.base.model_contracts import LossSum, MicroBatch
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.modules.call_checksums import Call, CallChecksums, first_difference
from lockstep.core.modules.module_trace import descriptions, fingerprint
from lockstep.core.numerics.checksum import checksum
from lockstep.core.numerics.loss import with_term_weights
from lockstep.core.numerics.seeds import seed_of
from lockstep.data.sampler import Owned
from lockstep.observe.diagnose.corruption import RankRun, Verdict, verdict
from lockstep.parallel.micro_batches import LOSS
from lockstep.parallel.replicated import Replicated
from lockstep.recipe.components import Components
from lockstep.run.user_code_checks import UserCodeChecks
from lockstep.training.step import undo

MOST_RUNS = 6
"""Limit of the runs of one step."""
MOST_KEPT = 100
"""Limit of the findings in the summary."""


def shifts(nodes: Sequence[int]) -> list[int]:
    """Return by how many ranks the shards move in each run of a step: first by none, then so that as few as possible
    stay on their machine. `nodes`: a number for the machine of each rank."""
    size = len(nodes)
    stay = {shift: sum(nodes[r] == nodes[(r + shift) % size] for r in range(size)) for shift in range(1, size)}
    return [0, *sorted(stay, key=lambda shift: stay[shift])]


class Recheck:
    """Runs steps in the strategy's place, and some of them again. Creating it is a collective.

    `leave`: ends this process for good, while the others go on; None where they could not. `facts`: for the summary.
    """

    def __init__(
        self,
        parts: Components,
        checks: UserCodeChecks,
        warn: Callable[[str], None],
        *,
        leave: Callable[[], None] | None,
        facts: dict[str, Any],
    ) -> None:
        self.parts, self.checks = parts, checks
        self.strategy = cast("Replicated", parts.strategy)  # those with CAN_RECHECK are
        self.warn, self.leave, self.facts = warn, leave, facts
        self.rank, self.fetched_share = parts.world.rank, parts.recipe.observe.recheck or 0.0
        known = self.facts.get("share", self.fetched_share), self.facts.get("right_at", parts.state.step)
        everyone = all_gather_object((platform.node(), self.rank - parts.world.local_rank, *known))
        names, nodes, shares, right = zip(*everyone, strict=True)
        self.machines, self.shifts = list(names), shifts(nodes)
        self.share: float = max(shares)  # a process that joins knows of no finding
        self.facts["right_at"] = min(right)  # the last step of which all runs gave the same
        self.own: list[RankRun] = []
        """Results of this rank in the runs of the current step."""

    def is_chosen(self, step: int, share: float) -> bool:
        """Return whether to run a step again: for the seed and the step alone, so all ranks agree."""
        return seed_of(self.parts.recipe.run.seed, "recheck", step) < share * 2**63

    def again(self, step: int) -> Owned | None:
        """Return the shards that this rank runs in the second run of a step, for the loader to fetch ahead: the same
        steps at any time, since the loaders of ranks are not at the same one."""
        is_run = len(self.machines) > 1 and self.is_chosen(step, self.fetched_share)
        return partial(self.strategy.owned_by, self._runners(1, ())) if is_run else None

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run a step. Its gradients, and all that `Strategy.forward_backward` leaves, are of a run that is right.

        Raises Corruption.
        """
        first = micro_batches[0]
        count = len(self.strategy.owned(first.shards, first.present))
        own, others = micro_batches[:count], micro_batches[count:]
        if not self.is_chosen(first.step, self.share) or self._is_off():
            return self.parts.strategy.forward_backward(own)
        self.own.clear()
        self._run(None, own)
        found = None
        for number in range(1, MOST_RUNS):
            undo(self.parts.state)
            runners = self._runners(number, found.wrong_shards if found else ())
            is_loaded = number == 1 and (others or len(self.machines) == 1)
            loss = self._run(runners, (others or own) if is_loaded else self._load(first.step, runners))
            found = verdict([*zip(*all_gather_object(self.own), strict=True)])
            if found.is_right:
                self._judge(first.step, found)
                return loss
        undo(self.parts.state)
        known = f": {found.described(self.machines)}" if found and found.culprits else ""
        what = f"step {first.step + 1} was run {MOST_RUNS} times, and no majority agrees on its gradients{known}"
        raise self._corruption(what)

    def _is_off(self) -> bool:
        """Return whether nothing can be compared; warn of it once."""
        why = self.checks.dependence_between_runs
        if why is not None and self.facts.setdefault("off", "") != why:
            self.facts["off"] = why
            self.warn(
                f"observe.recheck compares nothing, as two runs may give other gradients for another reason: {why}"
            )
        return why is not None

    def _runners(self, number: int, culprits: Collection[int]) -> tuple[int, ...]:
        """Return the ranks that share out the shards in a run of a step, without those that computed wrongly."""
        size, shift = len(self.machines), self.shifts[number % len(self.shifts)]
        ranks = tuple((rank + shift) % size for rank in range(size))
        return tuple(rank for rank in ranks if rank not in culprits) or ranks

    def _load(self, step: int, runners: tuple[int, ...]) -> Sequence[MicroBatch]:
        micro_batches = self.parts.micro_batches(step, partial(self.strategy.owned_by, runners))
        counts = self.parts.state.term_counts
        return micro_batches if counts is None else with_term_weights(micro_batches, counts)

    def _run(self, runners: tuple[int, ...] | None, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run the step, and keep hashes of what this rank gave."""
        strategy, passes, found = self.strategy, self.strategy.passes, dict[int, dict[object, list[Tensor]]]()
        strategy.runners, passes.checksums = runners, found
        try:
            loss = self.parts.strategy.forward_backward(micro_batches)
        finally:
            strategy.runners, passes.checksums = None, None
        keys = LOSS, *strategy.parameters  # gradients may arrive in another order
        shards = {shard: self._hash(each for key in keys for each in of.get(key, ())) for shard, of in found.items()}
        totals = [parameter.grad for parameter in strategy.parameters if parameter.grad is not None]
        totals += [buffer.before for buffer in passes.buffers.updated]
        totals += [loss.total, torch.as_tensor(loss.count), *(loss.sums[name] for name in sorted(loss.sums))]
        self.own.append(RankRun(shards=shards, total=self._hash(map(checksum, totals))))
        return loss

    def _hash(self, checksums: Iterable[Tensor]) -> str:
        return fingerprint(torch.stack([each.to(self.parts.device) for each in checksums]).tolist())

    def _judge(self, step: int, found: Verdict) -> None:
        """Tell of a process that computed wrongly in a step, and do what the settings say. Raises Corruption."""
        self.facts["steps"] = self.facts.get("steps", 0) + 1
        if found.is_undisturbed:
            self.facts["right_at"] = step + 1
            return
        what = f"step {step + 1}: {found.described(self.machines)}{self._module(step, found)}"
        self.facts["found"] = [*self.facts.get("found", ()), what][:MOST_KEPT]
        answer = self.parts.recipe.observe.on_corruption
        if answer == "warn":
            self.share = self.facts["share"] = 1.0
            self.warn(
                f"{what}. The run goes on with the right gradients, and rechecks every step until it ends or is resumed"
            )
        elif answer == "leave" and self.leave is not None and 0 < len(found.culprits) < len(self.machines):
            self.warn(f"{what}. It leaves the run, which goes on with the right gradients")
            if self.rank in found.culprits:
                self.leave()
        else:
            undo(self.parts.state)
            raise self._corruption(what)

    def _corruption(self, what: str) -> Corruption:
        return Corruption(
            f"{what}\n  Nothing of this step is kept, and checkpoints after step {self.facts['right_at']}, the last "
            "one that was found right, are set aside.\n  Start the run again without this machine, or with "
            "observe.on_corruption=warn.",
            self.facts["right_at"],
        )

    def _module(self, step: int, found: Verdict) -> str:
        """Name the first module of a rank that gives other outputs than on another rank, in a further forward pass of a
        shard. A collective."""
        others = [rank for rank in range(len(self.machines)) if rank not in found.culprits]
        if not found.wrong_shards or not others:
            return ""
        rank, shards = next(iter(found.wrong_shards.items()))
        calls = all_gather_object(self._calls(step, shards[0]) if self.rank in (rank, others[0]) else [])
        module = first_difference(calls[rank], calls[others[0]])
        if module is None:
            return "; in a further forward pass its modules gave the right outputs"
        return f"; the first module with other outputs is {descriptions(self.parts.model)[module]}"

    def _calls(self, step: int, shard: int) -> list[Call]:
        """Run the forward pass of a shard -> checksums of the inputs and outputs of every call of a module."""
        batch = self.parts.micro_batches(step, lambda _shards, _present: [shard])[0].batch
        randomness = self.strategy.randomness
        randomness.at(step, shard)
        eager = torch.compiler.set_stance("force_eager") if randomness.compiles else nullcontext()
        with eager, CallChecksums(self.parts.model) as calls:
            self.strategy.forward(batch)
        return calls.read()
