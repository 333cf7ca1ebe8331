"""FSDP: rows of every weight on each process, a block whole only while it is used.

S = processes that share the model, R = replicas, W = S * R.
"""

from collections.abc import Iterable
from dataclasses import replace

from lockstep.base.errors import LaunchError
from lockstep.core.reduction.shard_assignment import contiguous, strided
from lockstep.core.reduction.tree import cover
from lockstep.parallel.forecast import OVERLAP, Forecast, Setting, Times
from lockstep.parallel.measurements import Weight
from lockstep.parallel.memory_forecast import LARGE_BYTES, HeldMemory, Memory, held, timeline

COPIES = 4
"""Of a block, at the end of its backward pass: weights, gradients, what is sent of them and what is received; ..."""
COPIES_ALONE = 3
"""... a lone process receives nothing."""


def forecast(setting: Setting) -> Forecast:
    """Of the first rank, whose rows are never fewer than another's. Raises LaunchError."""
    facts, cluster = setting.facts, setting.cluster
    world, replicas = cluster.world, setting.section.replicas
    if world % replicas:
        raise LaunchError(f"parallel.replicas={replicas} does not divide {world} processes")
    size = world // replicas
    own = [part(w, size) for w in facts.weights]
    rounds, sums, brings = share(setting, size)
    gradients = (sums.most + 1) * facts.bytes_of(own, is_trained=True)
    forward = timeline(facts, [], range(len(facts.blocks)), keeps=False) + facts.working_bytes
    memory = Memory(
        **setting.between_steps(own, copies=replicas),
        gradients=gradients,
        activations=forward,
        communication=gathered(setting, COPIES if size > 1 else COPIES_ALONE),
        start=setting.start_bytes(facts.bytes_of(own)),
    )
    sent, exchange = traffic(setting, own, size=size, rounds=rounds, brings=brings)
    seconds = setting.seconds
    hidden = min(exchange, OVERLAP * rounds * seconds.passes) if facts.device == "cuda" else 0.0
    times = Times(
        compute=rounds * seconds.passes * cluster.crowd,
        fetch=rounds * seconds.fetch * cluster.crowd,
        exchange=exchange - hidden,
        idle=0.0,
        update=seconds.update * cluster.crowd * facts.bytes_of(own) / max(facts.parameter_bytes, 1),
    )
    shards = setting.shards
    notes = (f"{world - shards} of {world} processes have no micro-batch",) if world > shards else ()
    return Forecast(memory=memory, sent_bytes=sent, times=times, turns=rounds, notes=notes)


def part(weight: Weight, size: int) -> Weight:
    """The first rank's rows of a weight."""
    rows = -(-weight.rows // size)
    return replace(weight, rows=rows, bytes=rows * weight.bytes // max(weight.rows, 1))


def share(setting: Setting, size: int) -> tuple[int, HeldMemory, int]:
    """Rounds of a step, the partial sums of rows that they leave, and how many go to the other replicas."""
    shards, present, replicas = setting.shards, setting.present, setting.section.replicas
    own = contiguous(0, replicas, shards=shards, present=present) or [0]
    places = [strided(place, size, own) for place in range(size)]
    rounds = [tuple(shard for shard in row if shard is not None) for row in zip(*places, strict=True)]
    nodes = cover(frozenset(own), present)
    sums = held(tuple(rounds), present, nodes) if setting.is_exact else HeldMemory(before=(0,), after=(1,))
    return len(rounds), HeldMemory(before=sums.before, after=(0, *sums.after[:-1])), len(nodes)


def gathered(setting: Setting, copies: int) -> int:
    """Bytes of blocks that are whole for a moment, of the largest weights and the others apart where memory is, and of
    the model's own weights, which stay gathered."""
    facts = setting.facts
    inside = [w for w in facts.weights if not w.is_root]
    rest = facts.bytes_of(w for w in facts.weights if w.is_root)
    blocks = [facts.bytes_of(w for w in inside if w.block == number) for number in range(len(facts.blocks))]
    if not setting.section.reshard:
        return rest + sum(blocks) + (copies - 1) * max(blocks, default=0)
    return rest + copies * apart(blocks, facts.device)


def apart(sizes: Iterable[int], device: str) -> int:
    """The largest one; on a CPU, the largest of those that go back to the system, and the largest of the others."""
    sizes = list(sizes)
    if device != "cpu":
        return max(sizes, default=0)
    large, small = ([size for size in sizes if (size > LARGE_BYTES) == is_large] for is_large in (True, False))
    return max(large, default=0) + max(small, default=0)


def traffic(setting: Setting, own: list[Weight], *, size: int, rounds: int, brings: int) -> tuple[int, float]:
    """Bytes sent per step, and the seconds that it takes: weights are gathered for each micro-batch forwards and, but
    for the model's own, backwards; gradients go to the owner of the rows."""
    facts, cluster, section = setting.facts, setting.cluster, setting.section
    narrow = 0.5 if section.gather == "bf16" else 1.0
    again = facts.bytes_of(w for w in own if not w.is_root) if section.reshard else 0
    gather = round(rounds * (size - 1) * narrow * (facts.bytes_of(own) + again))
    scatter = rounds * (size - 1) * facts.bytes_of(own, is_trained=True)
    replicas = section.replicas
    across = round((brings + 1) * (replicas - 1) / replicas * facts.bytes_of(own, is_trained=True))
    modules = rounds * (len({w.block for w in own if not w.is_root}) + any(w.is_root for w in own))
    seconds = (
        cluster.seconds(gather, "gather", messages=2 * modules)
        + cluster.seconds(scatter, "scatter", messages=modules)
        + cluster.seconds(across, "pair", messages=2)
        + cluster.together(3)
    )
    return gather + scatter + across, seconds
