"""Processes that a script or a notebook starts and waits for: their output and their failures come to it."""

import sys
from collections.abc import Mapping
from typing import TextIO

from lockstep.base.errors import HangDetected, Interrupted, LockstepError, NonFiniteLoss, PeerLost, RunFailed, UserError
from lockstep.launch import launch_run
from lockstep.launch.elastic.failure import TAIL_LINES, Failure
from lockstep.launch.elastic.output_pipe import OutputPipe
from lockstep.launch.launchers._spawn import Spawn
from lockstep.recipe.recipe import Recipe

ERRORS: dict[int, type[LockstepError]] = {
    error.exit_code: error for error in (UserError, NonFiniteLoss, PeerLost, HangDetected, Interrupted)
}


def launch_here(recipe: Recipe, arguments: tuple[str, ...], *, name: str = "launch") -> None:
    """Start the processes of a recipe on this machine, and wait for their end.

    They do not import the calling script. A `name` other than "launch" is for processes that do not train. Raises
    UserError, Interrupted, and for other failures of a process a LockstepError with the cause and its last output.
    """
    is_training = name == "launch"
    recipe = launch_run.on_this_machine(recipe, "spawn")
    with launch_run.using_devices(recipe):
        request = launch_run.build_request(recipe, arguments, name)
        launcher = Spawn(recipe.launch, threads=recipe.run.threads, shards=recipe.train.shards)
        plan = launch_run.write_plan(recipe, request, launcher, is_training=is_training)
        outlets = _outlets()
        try:
            failure = launcher.failure(plan, recipe.folder / "logs" / ("" if is_training else name), outlets)
        except Interrupted as error:
            raise Interrupted(f"{error}; {_how_to_resume(recipe)}" if is_training else str(error)) from None
    if failure is not None:
        raise _error(failure, outlets, recipe, is_training=is_training)


def _outlets() -> dict[int, OutputPipe]:
    """Return pipes by file descriptor of rank 0; one is always for its errors, which explain a failure."""
    if sys.platform == "win32":
        return {}
    found = {2: OutputPipe(sys.stderr)}
    return found if _is_own_terminal(sys.stdout) else found | {1: OutputPipe(sys.stdout)}


def _is_own_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that a child process inherits, and can show a progress bar on."""
    try:
        return stream.fileno() == 1 and stream.isatty()
    except (OSError, ValueError, AttributeError):  # a notebook's, or of redirect_stdout
        return False


def _error(failure: Failure, outlets: Mapping[int, OutputPipe], recipe: Recipe, *, is_training: bool) -> LockstepError:
    last_words = outlets[2].tail.splitlines()[-TAIL_LINES:] if 2 in outlets else []
    is_of_another = "last lines of" in failure.text
    lines = [*([failure.text] if failure.text else []), *([] if is_of_another else last_words)]
    if failure.code == Interrupted.exit_code:
        return Interrupted("\n".join([*lines, *([_how_to_resume(recipe)] if is_training else [])]))
    text = "\n".join(lines) or f"the run has failed (exit code {failure.exit_code}); see {recipe.folder / 'logs'}"
    kind = ERRORS.get(failure.code)
    return kind(text) if kind else RunFailed(text, failure.exit_code)


def _how_to_resume(recipe: Recipe) -> str:
    file = recipe.folder / "recipe.yaml"
    if not file.is_file():
        return "nothing has been trained yet"
    return f'go on with lockstep.train("{file}"), or: lockstep train {file}'
