"""One order of Python's sets in all processes of a run, and in all runs: by default each interpreter has its own."""

import os
import sys

VARIABLE = "PYTHONHASHSEED"


def fix() -> None:
    """Begin this process anew with a fixed hash seed, unless the user has set one.

    A user's file may number classes, or build layers, in the order of a set of names. Not on Windows, where the new
    process would be another one, and not under a debugger, which would lose this one.
    """
    is_random = sys.flags.hash_randomization and os.environ.get(VARIABLE, "random") == "random"
    can_begin_anew = sys.executable and os.name != "nt" and sys.gettrace() is None
    if is_random and can_begin_anew and not sys.flags.ignore_environment:
        os.environ[VARIABLE] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
