"""Forecast of `pipeline`: each process has some of the blocks, partitioned by the times that were measured."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.base.errors import ModelError
from lockstep.core.reduction.tree import contiguous, cover
from lockstep.parallel.forecast import Forecast, Memory, PartialSums, Setting, peak_of_passes, sequential_sums
from lockstep.parallel.measurements import Measurements, Weight
from lockstep.parallel.module_profile import balanced_bounds


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    bounds: list[int]
    """The first block of each stage, and the number of blocks."""
    size: int
    """Processes that share a model."""
    replicas: int
    shards: list[int]
    """Shards of the replica with most of them."""
    rounds: int
    """Micro-batches of a replica, ghosts included."""

    def stages(self, rank: int) -> list[tuple[int, int]]:
        """Return (first, last) block of each of a process's stages: every `size`-th one."""
        return list(pairwise(self.bounds))[rank :: self.size]

    def blocks(self, rank: int) -> list[int]:
        return [block for first, last in self.stages(rank) for block in range(first, last)]

    def weights(self, facts: Measurements, rank: int) -> list[Weight]:
        blocks = self.blocks(rank)
        return [w for w in facts.weights if w.block in blocks]


def forecast(setting: Setting) -> Forecast:
    """Return memory of the rank that needs most, and time of the slowest. Raises LaunchError, ModelError."""
    plan, facts = planned(setting), setting.facts
    weights = [plan.weights(facts, rank) for rank in range(plan.size)]
    memories = [memory_of(setting, plan, rank) for rank in range(plan.size)]
    sent, exchange = traffic(setting, plan)
    busy, idle = busy_and_idle(setting, plan)
    cut = ", ".join(str(bound) for bound in plan.bounds[1:-1])
    updated = max(map(facts.bytes_of, weights))
    return Forecast(
        memory=max(memories, key=lambda memory: memory.peak),
        sent_bytes=sent,
        times=setting.times(plan.rounds, exchange, compute=busy, idle=idle, updated_bytes=updated),
        turns=plan.rounds + plan.size - 1,
        bubble=(plan.size - 1) / (plan.rounds * setting.section.stages_per_process + plan.size - 1),
        notes=(f"{plan.size} stages, cut before block {cut}",) if cut else (),
    )


def planned(setting: Setting) -> StagePlan:
    """Return the stages and micro-batches that the strategy would choose. Raises LaunchError, ModelError."""
    facts, section, world = setting.facts, setting.section, setting.cluster.world
    if facts.uncuttable is not None:
        raise ModelError(facts.uncuttable)
    blocks = len(facts.blocks)
    size = section.group_size(world, blocks)
    stages, replicas = size * section.stages_per_process, world // size
    trained = {w.block for w in facts.weights if w.is_trained}
    cut: Any = section.cut
    if cut == "auto":
        costs = [block.seconds for block in facts.blocks]
        bounds = balanced_bounds(costs, stages, obstacles=facts.obstacles, trained=trained)
    else:
        bounds = [0, *cut, blocks]
    if bounds is None or len(bounds) != stages + 1:
        raise ModelError(f"its {blocks} blocks cannot be cut into {stages} stages that train something each")
    owned = [contiguous(each, replicas, shards=setting.shards, present=setting.present) for each in range(replicas)]
    shards = max(owned, key=len)
    rounds = section.num_micro_batches(len(shards), size)
    return StagePlan(bounds=bounds, size=size, replicas=replicas, shards=shards, rounds=rounds)


def memory_of(setting: Setting, plan: StagePlan, rank: int) -> Memory:
    """Return the memory of a process: of its blocks, for the micro-batches that the schedule keeps in flight."""
    facts, weights, blocks = setting.facts, plan.weights(setting.facts, rank), plan.blocks(rank)
    sums = sequential_sums(plan.shards or [0], setting.present)
    size = facts.bytes_of(weights, is_trained=True)
    slots = len(cover(frozenset(plan.shards or [0]), setting.present)) if plan.replicas > 1 else 0
    kept = sum(facts.kept_bytes(block) for block in blocks)
    others = round((in_flight(setting, plan, rank) - 1) * kept)
    peak = peak_of_passes(facts, weights, blocks, sums=sums, others=others)
    # The profile at the start runs the whole model once, and frees each block's gradients at once.
    freed = PartialSums(before=(0,), after=(0,))
    profile = peak_of_passes(facts, facts.weights, range(len(facts.blocks)), sums=freed)
    across = round((plan.replicas - 1) / plan.replicas * slots * size)
    return setting.memory(
        weights,
        copies=plan.replicas,
        gradients=sums.most * size,
        activations=peak - sums.most * size,
        communication=slots * size + across,
        building=profile,
    )


def in_flight(setting: Setting, plan: StagePlan, rank: int) -> float:
    """Return the number of micro-batches whose activations the process keeps at once, in all of its blocks."""
    if setting.section.schedule == "gpipe":
        return plan.rounds
    if setting.section.schedule == "1f1b":
        return min(plan.rounds, plan.size - rank)
    chunks = setting.section.chunks
    warm_up = (chunks - 1) * plan.size + 2 * (plan.size - rank - 1) + 1
    return max(1.0, min(plan.rounds * chunks, warm_up) / chunks)


def traffic(setting: Setting, plan: StagePlan) -> tuple[int, float]:
    """Return the bytes that the busiest process sends per step, and the seconds: outputs of its stages and gradients of
    their inputs for each micro-batch, then gradients to the other replicas."""
    facts, cluster = setting.facts, setting.cluster
    outputs = {bound: facts.blocks[bound - 1].handed_bytes for bound in plan.bounds[1:-1]} if plan.size > 1 else {}
    ranks = range(plan.size)
    per_round = max(sum(outputs.get(bound, 0) for stage in plan.stages(rank) for bound in stage) for rank in ranks)
    inside = plan.rounds * per_round
    largest = max((plan.weights(facts, rank) for rank in ranks), key=lambda own: facts.bytes_of(own, is_trained=True))
    nodes = len(cover(frozenset(plan.shards), setting.present))
    across, across_seconds = setting.replica_traffic(largest, replicas=plan.replicas, nodes=nodes)
    inside_seconds = cluster.send_seconds(inside, "pair", messages=2 * plan.rounds)
    return inside + across, inside_seconds + across_seconds + cluster.collective_seconds(3)


def busy_and_idle(setting: Setting, plan: StagePlan) -> tuple[float, float]:
    """Return the seconds that the busiest process computes, and that it is idle.

    With a core each, the last micro-batch runs through all stages after the slowest stage has run the others. Where
    processes share cores, one stage computes while another is idle, and all work over all cores is the limit.
    """
    seconds, cluster = setting.seconds, setting.cluster
    stages = [sum(setting.facts.blocks[block].seconds for block in plan.blocks(rank)) for rank in range(plan.size)]
    own_core = seconds.passes * ((plan.rounds - 1) * max(stages) + sum(stages))
    local = min(cluster.per_machine, cluster.world)
    work = seconds.passes * plan.rounds * sum(stages) * plan.replicas * local
    work = work / cluster.world / min(cluster.slots, local)
    busy = max(seconds.passes * plan.rounds * max(stages), work)
    total = max(own_core, work)
    return min(total, busy), max(0.0, total - busy)
