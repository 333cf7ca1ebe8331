"""`lockstep profile`: where the time of a step goes, measured on the real processes."""

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.observe.profile.step_trace import trace_file
from lockstep.run.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.profile.profile_report import advice, print_profile
from lockstep.tools.profile.rank_profile import STAGE, ProfileRequest, RankProfile
from lockstep.tools.trials import TrialFailed, prepared, processes_text, timed_lines

WARM_UP = 4
"""Steps that are not measured: buckets, caches and allocators are set up in them."""
COUNTED = 2
"""Steps in which operations and kept tensors are counted."""
LAST = 1
"""So that the trace ends before the last step, which saves."""
FACTS = "profile.json"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    steps: int
    traced: int
    to: Path
    """Folder for the traces and the figures."""


def profile(recipe: Recipe, options: ProfileOptions, *, console: Console) -> list[RankProfile]:
    """Measure, print tables and advice, write the traces and figures. Raises ConfigError, TrialFailed."""
    processes = recipe.launch.processes_here(recipe.run.threads, recipe.train.shards)
    _make_folder(options.to)
    prepared(recipe)
    say = timed_lines(console)
    say(f"starting {processes_text(processes)} ...")
    ranks = _measured(recipe, options, processes=processes, say=say)
    said = advice(ranks, is_equal=recipe.parallel.HAS_EQUAL_WORK)
    facts = {"advice": said, "traced_steps": options.traced, "ranks": [each.model_dump() for each in ranks]}
    storage.write(options.to / FACTS, json.dumps(facts, indent=1))
    print_profile(ranks, console, traced=options.traced)
    text = f"traces, for https://ui.perfetto.dev or TensorBoard: {trace_file(options.to, 0)}"
    console.print(f"\n{said}\n\n{text}{' and so on' if processes > 1 else ''}", soft_wrap=True)
    return ranks


def _make_folder(folder: Path) -> None:
    """Make it, without what an earlier profile left in it. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in [*folder.glob("trace-rank-*.json.gz"), folder / FACTS]:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--to {folder}: cannot be written ({error.strerror}); name another folder") from None


def _measured(
    recipe: Recipe, options: ProfileOptions, *, processes: int, say: Callable[[str], None]
) -> list[RankProfile]:
    """Run the steps in a temporary folder, and say what is done in it. Raises TrialFailed."""
    steps = WARM_UP + options.steps + COUNTED + options.traced + LAST
    temporary = tempfile.TemporaryDirectory(prefix="lockstep-profile-", ignore_cleanup_errors=True)
    with ended_by_sigterm(), temporary as made:
        sections = trials.without_interruptions(recipe, Path(made) / "run", steps=steps)
        sections["observe"] = {"sinks": (), "file": None, "desync_every": None}
        varied = trials.varied(recipe, sections, parallel=recipe.parallel.fitted(processes))
        request = ProfileRequest(
            facts=Path(made), traces=options.to.absolute(), warm_up=WARM_UP, steps=options.steps, traced=options.traced
        )
        stages = _stages(Path(made) / STAGE, say)
        trial = trials.run(varied, Path(made), task="profile", request=request, processes=processes, poll=stages)
        if trial.code:
            raise TrialFailed(trial.output, trial.code)
        files = [Path(made) / f"rank-{rank}.json" for rank in range(processes)]
        return [RankProfile.model_validate_json(file.read_bytes()) for file in files]


def _stages(file: Path, say: Callable[[str], None]) -> Callable[[], None]:
    """To be called now and then: says the file's line where it is another one."""
    before = ""

    def look() -> None:
        nonlocal before
        with suppress(FileNotFoundError):
            if (text := file.read_text(encoding="utf-8")) != before:
                before = text
                say(f"{text} ...")

    return look
