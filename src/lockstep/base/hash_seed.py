"""One order of Python's sets in all processes of a run, and in all runs: by default each interpreter has its own."""

import os
import sys

VARIABLE = "PYTHONHASHSEED"


def chosen() -> str:
    """Return the hash seed that the user has set, else 0."""
    found = os.environ.get(VARIABLE, "random")
    return "0" if found == "random" else found


def fix() -> None:
    """Restart this program with a fixed hash seed, unless the user has set one.

    A user's file may number classes, or build layers, in the order of a set of names. Does nothing on Windows (the new
    process would be another one), under a debugger (it would lose this one), or in a child process of multiprocessing.
    """
    arguments = sys.argv[1:]
    is_program = sys.orig_argv[len(sys.orig_argv) - len(arguments) :] == arguments
    can_restart = is_program and sys.executable and os.name != "nt" and sys.gettrace() is None
    is_random = sys.flags.hash_randomization and os.environ.get(VARIABLE) != chosen()
    if is_random and can_restart and not sys.flags.ignore_environment:
        os.environ[VARIABLE] = chosen()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
