"""Forecast of `fsdp`: a shard of every weight on each process, a block gathered only while it is used."""

from dataclasses import replace

from lockstep.core.reduction.tree import contiguous, cover, strided
from lockstep.parallel.forecast import LARGE_BYTES, OVERLAP, Forecast, PartialSums, Setting, partial_sums, peak_of_pass
from lockstep.parallel.measurements import Weight

COPIES = 4
"""Copies of a block at the end of its backward pass: weights, gradients, their send and receive buffers."""
COPIES_ALONE = 3
"""Copies without a receive buffer, in a single process."""


def forecast(setting: Setting) -> Forecast:
    """Return the forecast of the first rank, whose shards are the largest. Raises LaunchError."""
    facts, cluster, replicas = setting.facts, setting.cluster, setting.section.replicas
    size = setting.section.group_size(cluster.world)
    weights = [local_shard(w, size) for w in facts.weights]
    rounds, sums, nodes = rounds_of(setting, size)
    memory = setting.memory(
        weights,
        copies=replicas,
        gradients=(sums.most + 1) * facts.bytes_of(weights, is_trained=True),
        activations=peak_of_pass(facts, [], range(len(facts.blocks)), keeps=False) + facts.working_bytes,
        communication=gathered_bytes(setting, COPIES if size > 1 else COPIES_ALONE),
        building=facts.bytes_of(weights),
    )
    inside, inside_seconds = shard_traffic(setting, weights, size=size, rounds=rounds)
    across, across_seconds = setting.replica_traffic(weights, replicas=replicas, nodes=nodes)
    exchange = inside_seconds + across_seconds + cluster.collective_seconds(3)
    hidden = min(exchange, OVERLAP * rounds * setting.seconds.passes) if facts.device == "cuda" else 0.0
    return Forecast(
        memory=memory,
        sent_bytes=inside + across,
        times=setting.times(rounds, exchange - hidden, updated_bytes=facts.bytes_of(weights)),
        turns=rounds,
        notes=setting.idle_notes(cluster.world),
    )


def local_shard(weight: Weight, size: int) -> Weight:
    """Return the first rank's rows of a weight."""
    rows = -(-weight.rows // size)
    return replace(weight, rows=rows, bytes=rows * weight.bytes // max(weight.rows, 1))


def rounds_of(setting: Setting, size: int) -> tuple[int, PartialSums, int]:
    """Return a step's rounds, the partial sums of rows they leave, and how many are all-reduced over replicas."""
    present = setting.present
    own = contiguous(0, setting.section.replicas, shards=setting.shards, present=present) or [0]
    by_rank = [strided(rank, size, own) for rank in range(size)]
    rounds = tuple(tuple(shard for shard in row if shard is not None) for row in zip(*by_rank, strict=True))
    nodes = cover(frozenset(own), present)
    sums = partial_sums(rounds, present, nodes) if setting.is_exact else PartialSums(before=(0,), after=(1,))
    return len(rounds), PartialSums(before=sums.before, after=(0, *sums.after[:-1])), len(nodes)


def gathered_bytes(setting: Setting, copies: int) -> int:
    """Return the bytes of gathered blocks, and of the weights outside of blocks, which stay gathered. On a CPU the
    largest block that is returned to the system adds to the largest of the others."""
    facts = setting.facts
    inside = [w for w in facts.weights if not w.is_root]
    outside = facts.bytes_of(w for w in facts.weights if w.is_root)
    blocks = [facts.bytes_of(w for w in inside if w.block == number) for number in range(len(facts.blocks))]
    if not setting.section.reshard:
        return outside + sum(blocks) + (copies - 1) * max(blocks, default=0)
    large = [size for size in blocks if size > LARGE_BYTES and facts.device == "cpu"]
    small = [size for size in blocks if size <= LARGE_BYTES or facts.device != "cpu"]
    return outside + copies * (max(large, default=0) + max(small, default=0))


def shard_traffic(setting: Setting, weights: list[Weight], *, size: int, rounds: int) -> tuple[int, float]:
    """Return the bytes that a rank sends within a replica, and seconds: for each micro-batch, weights are all-gathered
    in the forward pass and, except those outside of blocks, in the backward pass; gradients are reduce-scattered, by
    machine where each has several ranks: what stays within a machine takes little time beside the rest."""
    facts, cluster, section = setting.facts, setting.cluster, setting.section
    width = 0.5 if section.gather == "bf16" else 1.0
    again = facts.bytes_of(w for w in weights if not w.is_root) if section.reshard else 0
    gather = round(rounds * (size - 1) * width * (facts.bytes_of(weights) + again))
    machines = cluster.machines if setting.is_exact and section.replicas == 1 and size % cluster.machines == 0 else 1
    senders = machines if 1 < machines < size else size
    scatter = rounds * (senders - 1) * facts.bytes_of(weights, is_trained=True)
    modules = rounds * (len({w.block for w in weights if not w.is_root}) + any(w.is_root for w in weights))
    gather_seconds = cluster.send_seconds(gather, "gather", messages=2 * modules)
    return gather + scatter, gather_seconds + cluster.send_seconds(scatter, "scatter", messages=modules)
