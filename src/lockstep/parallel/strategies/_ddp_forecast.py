"""DDP: everything on every process, the gradients in buckets that the processes of a machine share.

G = bytes of the gradients, W = processes, L = those of a machine, M = machines, k = partial sums that a rank brings.
"""

from lockstep.core.reduction.shard_assignment import contiguous
from lockstep.core.reduction.tree import Shards, cover
from lockstep.parallel.forecast import OVERLAP, Forecast, Setting, Times
from lockstep.parallel.memory_forecast import HeldMemory, Memory, held, passes


def forecast(setting: Setting) -> Forecast:
    """Of the rank with the most shards, or partial sums."""
    facts, seconds, cluster = setting.facts, setting.seconds, setting.cluster
    world, shards, present = cluster.world, setting.shards, setting.present
    owned = {
        frozenset(contiguous(rank, world, shards=shards, present=present)) or frozenset([0]) for rank in range(world)
    }
    rounds = max(map(len, owned))
    slots = max(len(cover(own, present)) for own in owned) if setting.is_exact else 1
    size = facts.gradient_bytes
    beside = [(most(own, setting), passes_of(own, setting)) for own in owned]
    sums, dynamic = max(beside, key=lambda pair: pair[1])
    gradients = (slots + sums) * size
    buckets, sent, shared = traffic(setting, slots)
    memory = Memory(
        **setting.between_steps(facts.weights, copies=world),
        gradients=gradients,
        activations=dynamic - sums * size,
        communication=buckets,
        start=setting.start_bytes(),
    )
    exchange = cluster.seconds(sent, "pair", messages=2 * (world - 1)) + shared_seconds(setting, shared)
    exchange += cluster.together(2 + 2 * num_buckets(setting))
    has_room = facts.device == "cuda" or cluster.per_machine < cluster.slots
    hidden = min(exchange, OVERLAP * seconds.passes) if has_room else 0.0
    times = Times(
        compute=rounds * seconds.passes * cluster.crowd,
        fetch=rounds * seconds.fetch * cluster.crowd,
        exchange=exchange - hidden,
        idle=0.0,
        update=seconds.update * cluster.crowd,
    )
    notes = (f"{world - shards} of {world} processes have no micro-batch",) if world > shards else ()
    return Forecast(memory=memory, sent_bytes=sent, shared_bytes=shared, times=times, notes=notes)


def num_buckets(setting: Setting) -> int:
    """DDP fills buckets of about one size; in shared memory each of them waits for the others twice."""
    return max(1, round(setting.facts.gradient_bytes / (setting.section.bucket_mb * 2**20)))


def sums_of(own: Shards, setting: Setting) -> HeldMemory:
    """Partial sums beside the buckets: the last micro-batch's go into them as they come."""
    if not setting.is_exact:
        return HeldMemory(before=(0,) * len(own), after=(0,) * len(own))
    found = held(tuple((shard,) for shard in sorted(own)), setting.present, cover(own, setting.present))
    return HeldMemory(before=found.before, after=(*found.after[:-1], 0))


def most(own: Shards, setting: Setting) -> int:
    """How many of them are held at once."""
    return sums_of(own, setting).most


def passes_of(own: Shards, setting: Setting) -> int:
    """Bytes of a rank's passes, without the buckets."""
    facts = setting.facts
    return passes(facts, facts.weights, range(len(facts.blocks)), sums=sums_of(own, setting))


def traffic(setting: Setting, slots: int) -> tuple[int, int, int]:
    """Bytes of buffers for it, sent, and added up in shared memory."""
    facts, cluster = setting.facts, setting.cluster
    world, size = cluster.world, facts.gradient_bytes
    if world == 1:
        return 0, 0, 0
    largest = max((w.bytes for w in facts.weights if w.is_trained), default=0)
    bucket = min(size, max(round(setting.section.bucket_mb * 2**20), largest))
    if not setting.is_exact:
        return 0, round(2 * (world - 1) / world * size), 0
    neighbours = world // cluster.machines
    if facts.device == "cuda" or neighbours == 1 or world % cluster.machines:
        return 2 * bucket, round((slots + 1) * (world - 1) / world * size), 0
    across = (cluster.machines - 1) / cluster.machines
    mapped = round((neighbours - 1) / neighbours * slots * size)  # the others' pages that it adds up count as its own
    return mapped + round(across * bucket), round(2 * across * size / neighbours), size


def shared_seconds(setting: Setting, shared: int) -> float:
    """Each of a machine's L processes adds up 1/L of L rows: the same work for any L."""
    if not shared:
        return 0.0
    assert setting.cluster.links is not None
    return shared / setting.cluster.links.exchange * setting.cluster.crowd
