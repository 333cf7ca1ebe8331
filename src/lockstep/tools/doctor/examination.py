"""Runs the checks on a config and this machine, and shows what they found."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.base import plugins, storage
from lockstep.tools.doctor.doctor_context import MB, Diagnosis, DoctorContext, NotExamined, RankFacts

FAMILY = "tools.doctor.checks"
ORDER = {"error": 0, "warning": 1, "note": 2}
STYLES = {"error": "red", "warning": "yellow", "note": ""}
SCOPES = ("config", "machine", "processes", "training")
"""Subjects of checks in their order, since processes pass on the findings of their machine: the config and what it
names, each machine, the processes of a run, a few of its steps."""
ALONE = "only this machine was examined: for all of launch.nodes, give the command on each with --rendezvous HOST:PORT"
SHOWN_PAIRS = 20


def examine(context: DoctorContext, console: Console, *, is_quick: bool = False) -> list[Diagnosis]:
    """Return all findings, the worst first; print each check before it runs. `is_quick`: start no processes."""
    is_config, is_alone = context.config is not None, context.node is None
    is_wanted = {
        "config": is_config and context.is_leading,
        "machine": True,
        "processes": not is_quick,
        "training": is_config and is_alone and not is_quick,
    }
    found: list[Diagnosis] = []
    checks = [(name, plugins.find(FAMILY, name)) for name in plugins.names(FAMILY)]
    for name, check in sorted(checks, key=lambda each: SCOPES.index(each[1].SCOPE)):
        if not is_wanted[check.SCOPE]:
            continue
        console.print(f"checking {name.replace('_', ' ')} ...", style="dim")
        with suppress(NotExamined):
            own = context.of_this_machine if check.SCOPE == "machine" else found
            own += list(check.check(context))
    found += context.of_this_machine
    return sorted(found, key=lambda finding: (ORDER[finding.severity], finding.code, finding.host))


def show(found: Sequence[Diagnosis], context: DoctorContext, console: Console) -> None:
    """Print the measurements, then a line of cause and one of repair for each finding."""
    console.print()
    print_facts(context.ranks, console)
    if context.node is None and context.launch.max_nodes > 1:
        console.print(f"{ALONE}\n", soft_wrap=True)
    for finding in found:
        place = f"{finding.host}: " if finding.host else ""
        line = f"{finding.code} {finding.severity}: {place}{finding.cause}"
        console.print(line, style=STYLES[finding.severity], soft_wrap=True)
        console.print(f"    {finding.repair}", soft_wrap=True)
    counts = {severity: sum(finding.severity == severity for finding in found) for severity in ORDER}
    text = ", ".join(f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts.items() if count)
    console.print(text or "nothing found")


def write(found: Sequence[Diagnosis], context: DoctorContext, file: Path) -> None:
    findings = [each.model_dump() for each in found]
    ranks = [rank.model_dump() for rank in context.ranks]
    storage.write(file, json.dumps({"findings": findings, "ranks": ranks}, indent=1))


def print_facts(ranks: Sequence[RankFacts], console: Console) -> None:
    """Print the speed of processors, the time of collectives, and the links of the slowest pairs of ranks."""
    for host in dict.fromkeys(rank.host for rank in ranks):
        own = [rank for rank in ranks if rank.host == host]
        speeds = ", ".join(f"rank {rank.rank} {rank.flops / 1e9:.0f}" for rank in own)
        console.print(f"{host}: {own[0].processor}; GFLOP/s in matrix products: {speeds}", soft_wrap=True)
    if len(ranks) > 1:
        slowest = {name: max(rank.seconds[name] for rank in ranks) for name in ranks[0].seconds}
        times = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in slowest.items())
        console.print(f"collectives of 4 MiB: {times}", soft_wrap=True)
        table = Table("from rank", "to", "round trip of a byte", "speed", box=None, header_style="bold")
        rows = [(speed, latency, rank.rank, other) for rank in ranks for other, (latency, speed) in rank.links.items()]
        for speed, latency, one, other in sorted(rows)[:SHOWN_PAIRS]:
            table.add_row(str(one), str(other), f"{1e6 * latency:.0f} us", f"{speed / MB:.0f} MB/s")
        console.print(table)
