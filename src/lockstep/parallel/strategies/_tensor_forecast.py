"""Tensor parallelism: a part of each large layer on each process, and an exchange of activations in every block.

S = processes that share the model, R = replicas, W = S * R.
"""

from dataclasses import replace

from lockstep.base.errors import LaunchError, ModelError
from lockstep.core.reduction.shard_assignment import contiguous
from lockstep.core.reduction.tree import cover
from lockstep.parallel.forecast import Forecast, Setting, Times
from lockstep.parallel.measurements import Measurements, Weight
from lockstep.parallel.memory_forecast import Memory, held, passes

SUMS_PER_BLOCK = 4
"""Of activations: after attention and after the MLP, in both passes."""


def forecast(setting: Setting) -> Forecast:
    """Of the first rank. Raises LaunchError, and ModelError for a model that cannot be split so."""
    facts, cluster, seconds = setting.facts, setting.cluster, setting.seconds
    size, replicas = sizes(setting)
    check(facts, size)
    own = [part(w, size) for w in facts.weights]
    shards = contiguous(0, replicas, shards=setting.shards, present=setting.present) or [0]
    nodes = cover(frozenset(shards), setting.present)
    sums = held(tuple((shard,) for shard in shards), setting.present, nodes)
    trained = facts.bytes_of(own, is_trained=True)
    memory = Memory(
        **setting.between_steps(own, copies=replicas),
        gradients=(sums.most + 1) * trained,
        activations=passes(facts, own, range(len(facts.blocks)), sums=sums) - sums.most * trained,
        communication=max((block.handed_bytes for block in facts.blocks), default=0) if size > 1 else 0,
        start=setting.start_bytes(facts.bytes_of(own)),
    )
    sent, exchange = traffic(setting, own, size=size, rounds=len(shards), brings=len(nodes))
    split = facts.bytes_of(w for w in facts.weights if w.is_split) / max(facts.parameter_bytes, 1)
    times = Times(
        compute=len(shards) * seconds.passes * (1 - split + split / size) * cluster.crowd,
        fetch=len(shards) * seconds.fetch * cluster.crowd,
        exchange=exchange,
        idle=0.0,
        update=seconds.update * cluster.crowd * facts.bytes_of(own) / max(facts.parameter_bytes, 1),
    )
    notes = (f"{replicas - setting.shards} of {replicas} replicas have no micro-batch",)
    return Forecast(
        memory=memory,
        sent_bytes=sent,
        times=times,
        turns=len(shards),
        notes=notes if replicas > setting.shards else (),
    )


def sizes(setting: Setting) -> tuple[int, int]:
    """Processes that share a model, and how many replicas of it there are. Raises LaunchError."""
    world = setting.cluster.world
    size = world if setting.section.size == "all" else setting.section.size
    if world % size:
        raise LaunchError(f"parallel.size={size} does not divide {world} processes")
    return size, world // size


def check(facts: Measurements, size: int) -> None:
    """Raise ModelError where a model has no plan, or cannot be divided by so many processes."""
    if facts.unsplittable is not None:
        raise ModelError(facts.unsplittable)
    for what, count in facts.split_counts.items():
        if count % size:
            raise ModelError(f"{size} processes do not divide the {count} {what} of this model")


def part(weight: Weight, size: int) -> Weight:
    """What a rank holds of a weight."""
    return replace(weight, bytes=-(-weight.bytes // size)) if weight.is_split else weight


def traffic(setting: Setting, own: list[Weight], *, size: int, rounds: int, brings: int) -> tuple[int, float]:
    """Bytes sent per step, and the seconds that it takes: sums of activations between the processes of a replica, by
    rings, and gradients between replicas."""
    facts, cluster = setting.facts, setting.cluster
    activations = SUMS_PER_BLOCK * sum(block.handed_bytes for block in facts.blocks)
    inside = round(rounds * 2 * (size - 1) / size * activations)
    replicas = cluster.world // size
    across = round((brings + 1) * (replicas - 1) / replicas * facts.bytes_of(own, is_trained=True))
    messages = 2 * (size - 1) * rounds * SUMS_PER_BLOCK * len(facts.blocks)
    seconds = cluster.seconds(inside, "pair", messages=messages) + cluster.seconds(across, "pair", messages=2)
    return inside + across, seconds + cluster.together(3)
