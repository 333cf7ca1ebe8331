"""Forecast of `ddp`: the model on every process, gradients in buckets, in memory that a machine's L processes share."""

from lockstep.core.reduction.tree import Shards, contiguous_by_rank, cover
from lockstep.parallel.forecast import OVERLAP, Forecast, PartialSums, Setting, peak_of_passes, sequential_sums


def forecast(setting: Setting) -> Forecast:
    """Return the forecast of the rank with the most shards, or partial sums."""
    facts, cluster = setting.facts, setting.cluster
    world, present = cluster.world, setting.present
    owned = {own or frozenset([0]) for own in contiguous_by_rank(world, setting.shards)}
    slots = max(len(cover(own, present)) for own in owned) if setting.is_exact else 1
    size, blocks = facts.gradient_bytes, range(len(facts.blocks))
    sums = [sums_of(own, setting) for own in owned]
    peak, most = max((peak_of_passes(facts, facts.weights, blocks, sums=each), each.most) for each in sums)
    buckets, sent, shared = traffic(setting, slots)
    memory = setting.memory(
        facts.weights,
        copies=world,
        gradients=(slots + most) * size,
        activations=peak - most * size,
        communication=buckets,
    )
    num_buckets = max(1, round(facts.bucket_bytes / (setting.section.bucket_mb * 2**20)))
    exchange = cluster.send_seconds(sent, "pair", messages=2 * (world - 1))
    exchange += cluster.collective_seconds(2 + 2 * num_buckets)  # in shared memory there are two barriers for each
    if shared and cluster.links:  # each of L processes adds 1/L of L rows, the same work for any L
        exchange += shared / cluster.links.exchange * cluster.slowdown
    has_free_core = facts.device == "cuda" or cluster.per_machine < cluster.slots
    hidden = min(exchange, OVERLAP * setting.seconds.passes) if has_free_core else 0.0
    return Forecast(
        memory=memory,
        sent_bytes=sent,
        shared_bytes=shared,
        times=setting.times(max(map(len, owned)), exchange - hidden),
        notes=setting.idle_notes(world),
    )


def sums_of(own: Shards, setting: Setting) -> PartialSums:
    """Return the partial sums beside the buckets: those of the last micro-batch are written to the buckets at once."""
    if not setting.is_exact:
        return PartialSums(before=(0,) * len(own), after=(0,) * len(own))
    sums = sequential_sums(own, setting.present)
    return PartialSums(before=sums.before, after=(*sums.after[:-1], 0))


def traffic(setting: Setting, slots: int) -> tuple[int, int, int]:
    """Return the bytes of buffers, bytes sent, and bytes added up in shared memory."""
    facts, cluster = setting.facts, setting.cluster
    world, size = cluster.world, facts.bucket_bytes
    if world == 1:
        return 0, 0, 0
    largest = max((w.bytes for w in facts.weights if w.is_trained and not w.is_added_by_row), default=0)
    bucket = min(size, max(round(setting.section.bucket_mb * 2**20), largest))
    if not setting.is_exact:
        return 0, round(2 * (world - 1) / world * size), 0
    local = world // cluster.machines
    across = (cluster.machines - 1) / cluster.machines
    if local == 1 or world % cluster.machines or (facts.device == "cuda" and cluster.machines == 1):
        return 2 * bucket, round((slots + 1) * (world - 1) / world * size), 0
    if facts.device == "cuda":  # what stays within a machine takes little time beside the rest
        return 2 * bucket, round(2 * across * size / local), 0
    mapped = round((local - 1) / local * slots * size)  # pages of other processes count as this process's memory
    return mapped + round(across * bucket), round(2 * across * size / local), size
