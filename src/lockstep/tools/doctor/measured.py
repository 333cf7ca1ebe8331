"""What the processes of an examination have measured, as text and a table."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lockstep.tools.doctor.rank_facts import MB, RankFacts

SHOWN_PAIRS = 20
"""The slowest."""


def print_facts(ranks: Sequence[RankFacts], console: Console) -> None:
    """Speed of the processors, seconds of collectives, each pair of ranks."""
    for host in dict.fromkeys(rank.host for rank in ranks):
        own = [rank for rank in ranks if rank.host == host]
        speeds = ", ".join(f"rank {rank.rank} {rank.flops / 1e9:.0f}" for rank in own)
        console.print(f"{host}: {own[0].processor}; GFLOP/s in matrix products: {speeds}", soft_wrap=True)
    if len(ranks) > 1:
        slowest = {name: max(rank.seconds[name] for rank in ranks) for name in ranks[0].seconds}
        times = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in slowest.items())
        console.print(f"collectives of 4 MiB: {times}", soft_wrap=True)
        console.print(_pairs(ranks))


def _pairs(ranks: Sequence[RankFacts]) -> Table:
    table = Table("from rank", "to", "round trip of a byte", "speed", box=None, header_style="bold")
    rows = [(speed, latency, rank.rank, other) for rank in ranks for other, (latency, speed) in rank.links.items()]
    for speed, latency, one, other in sorted(rows)[:SHOWN_PAIRS]:
        table.add_row(str(one), str(other), f"{1e6 * latency:.0f} us", f"{speed / MB:.0f} MB/s")
    return table
