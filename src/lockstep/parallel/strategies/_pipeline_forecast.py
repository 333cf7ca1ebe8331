"""Pipeline: each process has some of the blocks, cut as the strategy would cut them by the times measured here.

n = stages, M = micro-batches of a replica, t = seconds of a stage for one of them.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.base.errors import LaunchError, ModelError
from lockstep.core.reduction.shard_assignment import contiguous
from lockstep.core.reduction.tree import cover
from lockstep.parallel.forecast import Forecast, Setting, Times
from lockstep.parallel.measurements import Measurements, Weight
from lockstep.parallel.memory_forecast import HeldMemory, Memory, held, passes
from lockstep.parallel.module_profile import balanced


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    bounds: list[int]
    """The block with which each stage begins, and the number of blocks."""
    size: int
    """Processes that share a model."""
    replicas: int
    rounds: int
    """M, ghosts included."""

    def blocks(self, rank: int) -> list[int]:
        """A process's blocks: every n-th stage is its own."""
        runs = list(pairwise(self.bounds))[rank :: self.size]
        return [block for first, last in runs for block in range(first, last)]


def forecast(setting: Setting) -> Forecast:
    """Of the rank that needs most memory; the time is the slowest one's. Raises LaunchError, ModelError."""
    plan = planned(setting)
    memories = [memory_of(setting, plan, rank) for rank in range(plan.size)]
    sent, exchange = traffic(setting, plan)
    busy, idle = times_of(setting, plan)
    cluster, seconds, facts = setting.cluster, setting.seconds, setting.facts
    largest = max(facts.bytes_of(weights_of(facts, plan.blocks(rank))) for rank in range(plan.size))
    times = Times(
        compute=busy,
        fetch=plan.rounds * seconds.fetch * cluster.crowd,
        exchange=exchange,
        idle=idle,
        update=seconds.update * cluster.crowd * largest / max(facts.parameter_bytes, 1),
    )
    chunks = setting.section.chunks if setting.section.schedule == "interleaved" else 1
    cut = ", ".join(str(bound) for bound in plan.bounds[1:-1])
    return Forecast(
        memory=max(memories, key=lambda memory: memory.peak),
        sent_bytes=sent,
        times=times,
        turns=plan.rounds + plan.size - 1,
        bubble=(plan.size - 1) / (plan.rounds * chunks + plan.size - 1),
        notes=(f"{plan.size} stages, cut before block {cut}",) if cut else (),
    )


def planned(setting: Setting) -> StagePlan:
    facts, section, world = setting.facts, setting.section, setting.cluster.world
    if facts.uncuttable is not None:
        raise ModelError(facts.uncuttable)
    count, chunks = len(facts.blocks), section.chunks if section.schedule == "interleaved" else 1
    size = section.stages
    if size == "auto":
        size = max(each for each in range(1, max(1, count // chunks) + 1) if world % each == 0)
    if world % size:
        raise LaunchError(f"parallel.stages={size} does not divide {world} processes")
    trained = {w.block for w in facts.weights if w.is_trained}

    def possible(start: int, end: int) -> bool:
        return start not in facts.obstacles and bool(trained.intersection(range(start, end)))

    cut: Any = section.cut
    bounds = [0, *cut, count] if cut != "auto" else balanced([b.seconds for b in facts.blocks], size * chunks, possible)
    if bounds is None or len(bounds) != size * chunks + 1:
        raise ModelError(f"its {count} blocks cannot be cut into {size * chunks} stages that train something each")
    replicas = world // size
    rounds = max(len(own) for own in shares(setting, replicas))
    rounds = max(rounds, size)
    return StagePlan(
        bounds=bounds, size=size, replicas=replicas, rounds=-(-rounds // size) * size if chunks > 1 else rounds
    )


def shares(setting: Setting, replicas: int) -> list[list[int]]:
    shards = setting.shards
    return [contiguous(each, replicas, shards=shards, present=setting.present) for each in range(replicas)]


def weights_of(facts: Measurements, blocks: list[int]) -> list[Weight]:
    """The weights that lie in some blocks."""
    return [w for w in facts.weights if w.block in blocks]


def memory_of(setting: Setting, plan: StagePlan, rank: int) -> Memory:
    """A process's: its blocks, for as many micro-batches as the schedule lets it have under way."""
    facts, blocks = setting.facts, plan.blocks(rank)
    weights = weights_of(facts, blocks)
    own = max(shares(setting, plan.replicas), key=len) or [0]
    nodes = cover(frozenset(own), setting.present)
    sums = held(tuple((shard,) for shard in own), setting.present, nodes)
    size = facts.bytes_of(weights, is_trained=True)
    slots = len(nodes) if plan.replicas > 1 else 0
    kept = sum(facts.kept_bytes(block) for block in blocks)
    others = round((under_way(setting, plan, rank) - 1) * kept)
    dynamic = passes(facts, weights, blocks, sums=sums, others=others)
    # The survey at the start runs the whole model once, and lets go of each block's gradients at once.
    alone = HeldMemory(before=(0,), after=(0,))
    whole = passes(facts, facts.weights, range(len(facts.blocks)), sums=alone)
    across = round((plan.replicas - 1) / plan.replicas * slots * size)
    return Memory(
        **setting.between_steps(weights, copies=plan.replicas),
        gradients=sums.most * size,
        activations=dynamic - sums.most * size,
        communication=slots * size + across,
        start=setting.start_bytes(whole),
    )


def under_way(setting: Setting, plan: StagePlan, rank: int) -> float:
    """Micro-batches whose activations the process holds at once, in those of all its blocks."""
    if setting.section.schedule == "gpipe":
        return plan.rounds
    if setting.section.schedule == "1f1b":
        return min(plan.rounds, plan.size - rank)
    chunks = setting.section.chunks
    warm_up = (chunks - 1) * plan.size + 2 * (plan.size - rank - 1) + 1
    return max(1.0, min(plan.rounds * chunks, warm_up) / chunks)


def traffic(setting: Setting, plan: StagePlan) -> tuple[int, float]:
    """Bytes that the busiest process sends per step, and the seconds: what a stage gives goes on, its gradient comes
    back; replicas then add up their gradients."""
    facts, cluster = setting.facts, setting.cluster
    cuts = {bound: facts.blocks[bound - 1].handed_bytes for bound in plan.bounds[1:-1]}
    moved = []
    for rank in range(plan.size):
        runs = list(pairwise(plan.bounds))[rank :: plan.size]
        moved.append(sum(cuts.get(first, 0) + cuts.get(last, 0) for first, last in runs) if plan.size > 1 else 0)
    handed = plan.rounds * max(moved)
    own = max(shares(setting, plan.replicas), key=len)
    brings = len(cover(frozenset(own), setting.present))
    size = max(facts.bytes_of(weights_of(facts, plan.blocks(rank)), is_trained=True) for rank in range(plan.size))
    across = round((brings + 1) * (plan.replicas - 1) / plan.replicas * size)
    seconds = cluster.seconds(handed, "pair", messages=2 * plan.rounds) + cluster.seconds(across, "pair", messages=2)
    return handed + across, seconds + cluster.together(3)


def times_of(setting: Setting, plan: StagePlan) -> tuple[float, float]:
    """Seconds that the busiest process computes, and that it waits.

    With a core each, the last micro-batch comes through all stages after the slowest one has done the others; where
    processes share cores, one stage's waiting is another's core, and the whole work over all cores is the limit.
    """
    seconds, cluster = setting.seconds, setting.cluster
    stages = [sum(setting.facts.blocks[block].seconds for block in plan.blocks(rank)) for rank in range(plan.size)]
    own_core = seconds.passes * ((plan.rounds - 1) * max(stages) + sum(stages))
    local = min(cluster.per_machine, cluster.world)
    work = (
        seconds.passes * plan.rounds * sum(stages) * plan.replicas * local / cluster.world / min(cluster.slots, local)
    )
    busy = seconds.passes * plan.rounds * max(stages)
    total = max(own_core, work)
    return min(total, max(busy, work)), max(0.0, total - max(busy, work))
