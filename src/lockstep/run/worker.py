"""The entry point of every process of a run: load the recipe, do a task, exit with a meaningful code.

    python -m lockstep.run.worker CONFIG.yaml [section.key=value ...] [--resume HOW] [--task NAME --request FILE]

One process by itself, or one of many under torchrun or any launcher that sets torchrun's variables.
"""

# ruff: noqa: E402 (the imports take seconds, during which the launcher has to be watched already)
import sys

from lockstep.base import hash_seed
from lockstep.base.lifetime import LAUNCHER, begin, has_imported

if __name__ == "__main__":
    hash_seed.fix()
    begin(sys.argv)

import argparse
import logging
import os
import signal
import threading
import traceback
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lockstep.base import closed_output, config, devices, plugins, storage, trust, user_code
from lockstep.base.errors import LockstepError, PeerLost, UserError, few, printable
from lockstep.base.world import World
from lockstep.checkpoint.writer import THREAD
from lockstep.core.distributed import process_group
from lockstep.core.distributed.collectives import broadcast_object, reported_once
from lockstep.core.host import deferred_imports
from lockstep.core.host.numa import bind_near
from lockstep.core.host.signals import SignalWatch
from lockstep.protocol import live_messages
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust
from lockstep.run import leftover_processes

if os.name != "nt":
    import fcntl

TASKS = "run.tasks"


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line of a worker."""
    parser = argparse.ArgumentParser(prog="lockstep.run.worker", description="One process of a Lockstep run.")
    parser.add_argument("config", type=Path, help="a YAML file, or a run's recipe.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--resume", default="auto", help="auto, never, or a checkpoint's folder")
    parser.add_argument("--allow-drift", action="store_true", help="resume although the numeric recipe has changed")
    parser.add_argument(trust.OPTION, action="store_true", help="execute the code of a run that somebody else made")
    parser.add_argument(trust.KNOWN, default="", help="sha256 of code that may be executed", metavar="SHA256[,SHA256]")
    parser.add_argument(
        "--began", type=float, default=0.0, help="when the run was launched (seconds since 1970): for max_minutes"
    )
    parser.add_argument("--task", default="train", choices=plugins.names(TASKS), help="what to do")
    parser.add_argument("--request", type=Path, default=Path(), help="the file with the request of the task's command")
    parser.add_argument(LAUNCHER, type=int, help="pid of the launcher: when it ends, so does this process")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run one process to its end; returns its exit code."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    deferred_imports.install()
    options, world, signals = arguments(argv), World.from_environment(), SignalWatch(live_messages.ignored_signals())
    closed_output.tolerate_lost_reader()
    append_to_logs()
    with signals.watching():
        try:
            recipe = recipes.begun(recipes.load(options.config, options.overrides), options.config)
            authorize(recipe, options)
            devices.choose(recipe.run.device, shares_gpus=recipe.launch.share_gpus)
            devices.check(recipe.run.device)
            world = World.from_environment()  # again, with what the recipe says of sharing GPUs
            kind = plugins.find(TASKS, options.task)
            has_imported()
            with ExitStack() as stack:
                if kind.NEEDS_GROUP:
                    timeout = recipe.launch.collective_timeout_seconds
                    bind_near(device := process_group.device_of(world))
                    stack.enter_context(process_group.opened(world, device, timeout))
                    stack.enter_context(reported_once(sys.stderr))  # an error that all ranks share
                    recipe = of_main_rank(recipe, options)
                task = kind.build(recipe, world, signals, request=options.request, began=options.began)
                stack.enter_context(closing(task))
                stack.enter_context(task.watching())
                task.run(options.resume, allow_drift=options.allow_drift)
        except LockstepError as error:
            if not error.is_shared or error.rank == world.rank:
                record(error)
            if not error.is_shared:
                sys.stderr.write(f"{error}\n")
            return error.exit_code
        except BaseException as error:  # also a KeyboardInterrupt or SystemExit, which only user code raises here
            if process_group.is_lost_peer(error):
                return report_lost_peer(world, error)
            return report(error)
    return 0


def record(error: BaseException) -> None:
    """Record an error for the launcher, which reports the first failure; do nothing on a full disk."""
    with suppress(OSError):
        get_error_handler().record_exception(error)


def report(error: BaseException) -> int:
    """Report what has ended this process -> its exit code."""
    record(error)
    if user_code.is_from_user(error):
        sys.stderr.write(f"{printable(user_code.report(error))}\n")
    elif text := storage.full_disk(error):
        sys.stderr.write(f"{printable(text)}\n")
        return UserError.exit_code
    else:
        traceback.print_exc()
    return 1


def of_main_rank(recipe: recipes.Recipe, options: argparse.Namespace) -> recipes.Recipe:
    """Return rank 0's recipe, for this rank: the name of the run may come of the time. Raises UntrustedCode."""
    own = config.dump(recipe)
    text = broadcast_object(own)
    if text == own:
        return recipe
    recipe = recipes.parse(text, file=str(options.config))
    authorize(recipe, options)
    return recipe


def authorize(recipe: recipes.Recipe, options: argparse.Namespace) -> None:
    """Allow the code of a config of the user's; that of a run folder or an export has to be known, or allowed by the
    launcher's arguments. Raises UntrustedCode."""
    codes = recipe_trust.code_of_files(recipe)
    if options.trust_code or options.known_code:
        trust.accept([trust.OPTION] if options.trust_code else [trust.KNOWN, options.known_code])
    if options.known_code or options.task == "evaluate" or recipe_trust.is_in_run_folder(options.config):
        trust.authorize(codes, trusts=options.trust_code, folder=options.config.parent)
    else:
        trust.own(codes)


def append_to_logs() -> None:
    """Make stdout and stderr append: they may be one file opened twice, and would overwrite each other."""
    if os.name == "nt":
        return
    for stream in (1, 2):
        with suppress(OSError):
            fcntl.fcntl(stream, fcntl.F_SETFL, fcntl.fcntl(stream, fcntl.F_GETFL) | os.O_APPEND)


def report_lost_peer(world: World, error: BaseException) -> int:
    """Report that another process has exited, which reports the reason itself, or was waited for too long."""
    if process_group.is_timeout(error):
        sys.stderr.write(
            f"rank {world.rank} waited for another process longer than launch.collective_timeout_seconds, and gave up; "
            "if that was only slow, raise the setting\n"
        )
    elif not (world.is_main and world.has_agent):  # the launcher, on the same terminal, reports which process
        sys.stderr.write(f"rank {world.rank} lost the connection to another process: {str(error).splitlines()[0]}\n")
    return PeerLost.exit_code


def leave(code: int) -> NoReturn:
    """Exit, after ending what the user's code left running.

    A hanging save has a thread in native code, which would abort an interpreter that shuts down.
    """
    if code:  # the launcher's SIGTERM would replace the exit code
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_saving = any(thread.name == THREAD for thread in threading.enumerate())
    if left := leftover_processes.end_leftovers(0.0 if code or is_saving else leftover_processes.PATIENCE_SECONDS):
        sys.stderr.write(f"ended, since your code has started and not ended it: {few(left, 5)}\n")
    if is_saving or leftover_processes.threads():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(argv: list[str]) -> NoReturn:
    """Run one process to its end, and exit."""
    leave(main(argv))


if __name__ == "__main__":
    run(sys.argv[1:])
