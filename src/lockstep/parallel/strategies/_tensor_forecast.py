"""Forecast of `tensor`: a shard of each large layer on each process, and all-reduces of activations in every block."""

from dataclasses import replace

from lockstep.base.errors import LaunchError, ModelError
from lockstep.core.reduction.tree import contiguous, cover
from lockstep.parallel.forecast import Forecast, Setting, peak_of_passes, sequential_sums

SUMS_PER_BLOCK = 4
"""All-reduces of activations: after attention and after the MLP, in both passes."""


def forecast(setting: Setting) -> Forecast:
    """Return the forecast of the first rank. Raises LaunchError, and ModelError for a model that cannot be split so."""
    facts, cluster = setting.facts, setting.cluster
    size = cluster.world if setting.section.size == "all" else setting.section.size
    check(setting, size)
    replicas = cluster.world // size
    weights = [replace(w, bytes=-(-w.bytes // size)) if w.is_split else w for w in facts.weights]
    shards = contiguous(0, replicas, shards=setting.shards, present=setting.present) or [0]
    sums, trained = sequential_sums(shards, setting.present), facts.bytes_of(weights, is_trained=True)
    memory = setting.memory(
        weights,
        copies=replicas,
        gradients=(sums.most + 1) * trained,
        activations=peak_of_passes(facts, weights, range(len(facts.blocks)), sums=sums) - sums.most * trained,
        communication=max((block.handed_bytes for block in facts.blocks), default=0) if size > 1 else 0,
        building=facts.bytes_of(weights),
    )
    inside, inside_seconds = activation_traffic(setting, size=size, rounds=len(shards))
    nodes = len(cover(frozenset(shards), setting.present))
    across, across_seconds = setting.replica_traffic(weights, replicas=replicas, nodes=nodes)
    split = facts.bytes_of(w for w in facts.weights if w.is_split) / max(facts.parameter_bytes, 1)
    compute = len(shards) * setting.seconds.passes * (1 - split + split / size) * cluster.slowdown
    exchange = inside_seconds + across_seconds + cluster.collective_seconds(3)
    return Forecast(
        memory=memory,
        sent_bytes=inside + across,
        times=setting.times(len(shards), exchange, compute=compute, updated_bytes=facts.bytes_of(weights)),
        turns=len(shards),
        notes=setting.idle_notes(replicas, "replicas"),
    )


def check(setting: Setting, size: int) -> None:
    """Raise ModelError where a model cannot be divided by `size`, LaunchError where the processes cannot."""
    if setting.cluster.world % size:
        raise LaunchError(f"parallel.size={size} does not divide {setting.cluster.world} processes")
    if setting.facts.unsplittable is not None:
        raise ModelError(setting.facts.unsplittable)
    for what, count in setting.facts.split_counts.items():
        if count % size:
            raise ModelError(f"{size} processes do not divide the {count} {what} of this model")


def activation_traffic(setting: Setting, *, size: int, rounds: int) -> tuple[int, float]:
    """Return the bytes that a rank sends in ring all-reduces of activations within a replica, and seconds."""
    blocks = setting.facts.blocks
    activations = SUMS_PER_BLOCK * sum(block.handed_bytes for block in blocks)
    sent = round(rounds * 2 * (size - 1) / size * activations)
    messages = 2 * (size - 1) * rounds * SUMS_PER_BLOCK * len(blocks)
    return sent, setting.cluster.send_seconds(sent, "pair", messages=messages)
