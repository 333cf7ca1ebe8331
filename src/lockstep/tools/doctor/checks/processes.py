"""The processes that a run would have, started for real: processors, and the network between them."""

import platform
import secrets
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.base import storage, trust
from lockstep.base.errors import LaunchError, PeerLost
from lockstep.launch import launch_run
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.doctor.doctor_context import MB, Diagnosis, DoctorContext, ExaminationRequest, RankFacts
from lockstep.tools.trials import processes_text, strategy, varied

SCOPE = "processes"
SLOW_PROCESSOR = 0.75
SLOW_LINK = 0.4
TIMEOUT_SECONDS = 60.0
"""Timeout of a collective: short, since processes may be unable to connect to each other."""


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    """Check the processes of this machine, or of all machines that take part."""
    recipe = varied(context.recipe, {}, parallel=strategy("ddp"))
    measure = _here if context.node is None else _on_nodes
    with trials.temporary_folder("lockstep-doctor-") as folder:
        try:
            context.ranks = measure(context, recipe, folder)
        except LaunchError as error:
            advice = f"{error.code} in docs/troubleshooting.md says what to try"
            yield Diagnosis.error(error.code, str(error), advice)
            return
    if context.node is not None:
        context.of_this_machine.clear()  # node 0 has it with the facts of the ranks, and shows it
    yield from judged(context.ranks)


def _here(context: DoctorContext, recipe: Recipe, folder: Path) -> list[RankFacts]:
    recipe = varied(recipe, {"run": {"dir": folder, "name": "run"}}, parallel=recipe.parallel)
    trial = trials.run(recipe, folder, task="doctor", request=ExaminationRequest(), processes=context.processes)
    if trial.code:
        output = trial.output.strip() or "they wrote nothing"
        raise LaunchError(f"{processes_text(context.processes)} ended with exit code {trial.code}:\n{output}")
    return trials.results(recipe.folder, RankFacts)


def _on_nodes(context: DoctorContext, recipe: Recipe, folder: Path) -> list[RankFacts]:
    """Measure on all machines -> facts of all ranks on node 0, none on the others. Raises LaunchError."""
    assert context.node is not None and context.config is not None
    request = folder / "request.json"
    found = tuple(each.model_copy(update={"host": platform.node()}) for each in context.of_this_machine)
    storage.write(request, ExaminationRequest(findings=found).model_dump_json())
    sections: dict[str, dict[str, Any]] = {"run": {"name": f"doctor-{secrets.token_hex(4)}"}}
    sections["launch"] = {"max_restarts": 0, "collective_timeout_seconds": TIMEOUT_SECONDS}
    recipe = varied(recipe, sections, parallel=recipe.parallel)
    arguments = ("--task", "doctor", "--request", str(request), *trust.arguments())
    try:
        code = launch_run.launch_node(recipe, context.config, arguments, node=context.node, name="doctor")
        ranks = trials.results(recipe.folder, RankFacts)
    except PeerLost as error:
        raise LaunchError(str(error), code="LS-NODE-01") from None
    finally:
        shutil.rmtree(recipe.folder, ignore_errors=True)
    if code:
        raise LaunchError(f"the processes of all machines ended with exit code {code}, as told above")
    return ranks


def judged(ranks: Sequence[RankFacts]) -> Iterator[Diagnosis]:
    """Yield the ranks' own findings, then those that follow from comparing their facts."""
    for rank in ranks:
        yield from rank.findings
    if len(kinds := {rank.processor for rank in ranks}) > 1:
        yield Diagnosis.warning(
            "LS-RANK-02",
            f"machines have different processors: {', '.join(sorted(kinds))}",
            "the same bits are promised on machines of one kind only (docs/same-bits.md): choose such machines",
        )
    yield from _slow_processors(ranks)
    yield from _slow_links(ranks)


def _slow_processors(ranks: Sequence[RankFacts]) -> Iterator[Diagnosis]:
    for rank in ranks:
        others = [other.flops for other in ranks if other is not rank]
        usual = statistics.median(others) if others else 0.0
        if rank.flops < SLOW_PROCESSOR * usual:
            yield Diagnosis.warning(
                "LS-RANK-03",
                f"rank {rank.rank} on {rank.host} reaches {rank.flops / usual:.0%} of the others' speed",
                "look at heat and power saving there: every step waits for the slowest rank",
            )


def _slow_links(ranks: Sequence[RankFacts]) -> Iterator[Diagnosis]:
    speeds = {(rank.rank, other): speed for rank in ranks for other, (_, speed) in rank.links.items()}
    usual = statistics.median(speeds.values()) if len(speeds) > 2 else 0.0
    for (one, other), speed in speeds.items():
        if speed < SLOW_LINK * usual:
            yield Diagnosis.warning(
                "LS-NET-04",
                f"rank {one} sends {speed / MB:.0f} MB/s to rank {other}; the median is {usual / MB:.0f} MB/s",
                "look at the cable, the switch, and launch.interface of these machines",
            )
