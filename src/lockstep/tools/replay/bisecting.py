"""`lockstep bisect`: the first step, and in it the first module, gradient or sum, at which two runs differ."""

from collections.abc import Sequence
from contextlib import nullcontext

from rich.console import Console

from lockstep.base.errors import CheckpointError
from lockstep.tools import trials
from lockstep.tools.compare.run_evidence import LOGGED, evidence
from lockstep.tools.prove.trace_diff import COMPARED, explained, first_difference, read
from lockstep.tools.replay.replaying import Facts, LoggedRun, ReplayRequest


def first_unequal(a: Facts, b: Facts) -> tuple[int, int | None]:
    """Return the last common step with equal chains, 0 if there is none, and the first with others."""
    common = [step for step in sorted(a) if "chain" in a[step] and "chain" in b.get(step, {})]
    if not common:
        raise CheckpointError("the two runs have logged no step in common: there is nothing to bisect")
    first = next((step for step in common if a[step]["chain"] != b[step]["chain"]), None)
    return max((step for step in common if first is None or step < first), default=0), first


def bisect(runs: Sequence[LoggedRun], console: Console, *, hidden: str = "") -> int:
    """Find where the logs part, run both again there, traced, and print what differs first, without `hidden` in paths;
    return 0 if nothing does, else 1. Raises CheckpointError, TrialFailed."""
    equal, first = first_unequal(*(run.log.facts for run in runs))
    if first is None:
        console.print(f"same bits: the chains are equal up to step {equal}, the last one that both have logged")
        return 0
    console.print(f"by the logs, the chains are equal up to step {equal}, and differ at step {first}", soft_wrap=True)
    report, traces, facts, own = trials.timed_lines(console), [], list[Facts](), list[str]()
    own_code = all(run.placed is None for run in runs)
    forking = trials.forking(runs[0].recipe, "replay") if own_code else nullcontext()
    with forking, trials.temporary_folder("lockstep-bisect-") as folder:
        for name, run in zip("AB", runs, strict=True):
            if own_code:
                trials.prepared(run.recipe)
            request = run.started(ReplayRequest(first=equal + 1, last=first, opens=False, traced_from=equal + 1))
            report(f"{name}: steps {request.start + 1} to {first} of {run.log.name} ...")
            run.again(request, folder / name, report).checked()
            traces.append(read(folder / name))
            facts.append(evidence(folder / name).facts)
            if facts[-1].get(first, {}).get("chain") != run.log.facts[first]["chain"]:
                own.append(f"{name}: its log is not reproduced here; what differs in it is not only its code and data")
    difference, (_, step) = first_difference(*traces), first_unequal(*facts)
    if difference:
        own.insert(0, explained(difference, traces[0], COMPARED).replace(hidden, ""))
    elif step is not None:
        name = next(name for name in LOGGED if facts[0][step].get(name) != facts[1][step].get(name))
        values = " and ".join(repr(each[step].get(name)) for each in facts)
        what = f"all weights, gradients and sums are equal, but its {name.replace('_', ' ')} is {values}"
        own.insert(0, f"step {step}: {what}")
    else:
        own.append("run again, both give the same bits")
    console.print(*own, sep="\n", soft_wrap=True)
    return 1
