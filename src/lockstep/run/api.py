"""Runs started from Python: `lockstep.spawn(...)` in a notebook or script."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lockstep.base.errors import HangDetected, Interrupted, LockstepError, NonFiniteLoss, PeerLost, RunFailed, UserError
from lockstep.launch import launch_run
from lockstep.launch.elastic.failure import TAIL_LINES, Failure
from lockstep.launch.launchers._spawn import OutputPipe, Spawn
from lockstep.run import recipe as recipes
from lockstep.run import recipe_trust
from lockstep.run.recipe import Recipe

ERRORS: dict[int, type[LockstepError]] = {
    error.exit_code: error for error in (UserError, NonFiniteLoss, PeerLost, HangDetected, Interrupted)
}


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json: "digest", "steps", "evaluation" and more."""
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, e.g. for pandas.DataFrame(run.metrics); [] without that sink."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return [json.loads(line) for line in lines]


def spawn(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *overrides: str,
    processes: int | None = None,
    resume: str = "auto",
    allow_drift: bool = False,
    trust_code: bool = False,
) -> Run:
    """Train on processes of this machine and wait for the end.

    `config` is a YAML file, a run's recipe.yaml, or the sections themselves: {"train": {"epochs": 3}}; `overrides`
    are of the form "train.epochs=3"; `processes` replaces launch.processes; `resume`, `allow_drift` and
    `trust_code` are those of `lockstep train`. Output of rank 0 goes to the current sys.stdout and sys.stderr (on
    Windows to the terminal); other ranks write to logs/rank-N.log.

    The processes do not import the calling script or notebook: it needs no `if __name__ == "__main__":`. Raises
    UserError for what the user can fix; Interrupted after a signal (Ctrl-C, a notebook's stop button), when the run can
    be resumed; for other failures of a process a LockstepError with the cause and its last output.
    """
    if processes is not None:
        overrides = (*overrides, f"launch.processes={processes}")
    recipe = launch_run.on_this_machine(_recipe(config, overrides), "spawn")
    path = None if isinstance(config, Mapping) else Path(config)
    trust = recipe_trust.authorize(recipe, path or Path("spawn"), trusts=trust_code)
    drift = ["--allow-drift"] if allow_drift else []
    request = launch_run.build_request(recipe, ("--resume", resume, *drift, *trust))
    launcher = Spawn(recipe.launch, threads=recipe.run.threads, shards=recipe.train.shards)
    plan = launch_run.write_plan(recipe, request, launcher)
    outlets = _outlets()
    try:
        failure = launcher.failure(plan, recipe.folder / "logs", outlets)
    except Interrupted as error:
        raise Interrupted(f"{error}; {_how_to_resume(recipe)}") from None
    if failure is not None:
        raise _error(failure, outlets, recipe)
    return Run(recipe.folder)


def _recipe(config: str | os.PathLike[str] | Mapping[str, Any], overrides: tuple[str, ...]) -> Recipe:
    if isinstance(config, Mapping):
        return recipes.with_run_name(recipes.of_sections(config, overrides), Path("spawn"))
    return recipes.with_run_name(recipes.load(Path(config), overrides), Path(config))


def _outlets() -> dict[int, OutputPipe]:
    """By file descriptor of rank 0. Its errors always come this way: they are the last words."""
    if sys.platform == "win32":
        return {}
    found = {2: OutputPipe(sys.stderr)}
    return found if _is_own_terminal(sys.stdout) else found | {1: OutputPipe(sys.stdout)}


def _is_own_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that a child process inherits, and can show a progress bar on."""
    try:
        return stream.fileno() == 1 and stream.isatty()
    except (OSError, ValueError, AttributeError):  # a notebook's, or of redirect_stdout
        return False


def _error(failure: Failure, outlets: Mapping[int, OutputPipe], recipe: Recipe) -> LockstepError:
    last_words = outlets[2].tail.splitlines()[-TAIL_LINES:] if 2 in outlets else []
    is_of_another = "last lines of" in failure.text
    lines = [*([failure.text] if failure.text else []), *([] if is_of_another else last_words)]
    if failure.code == Interrupted.exit_code:
        return Interrupted("\n".join([*lines, _how_to_resume(recipe)]))
    text = "\n".join(lines) or f"the run has failed (exit code {failure.exit_code}); see {recipe.folder / 'logs'}"
    kind = ERRORS.get(failure.code)
    return kind(text) if kind else RunFailed(text, failure.exit_code)


def _how_to_resume(recipe: Recipe) -> str:
    file = recipe.folder / "recipe.yaml"
    if not file.is_file():
        return "nothing has been trained yet"
    return f'go on with lockstep.spawn("{file}"), or: lockstep train {file}'
