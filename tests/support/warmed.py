"""New interpreters that Lockstep's code starts from the process of the tests, forked from a warm process instead.

Commands start theirs as for a user, and so does what the tests do not bring here.
"""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import warm

from lockstep.inference.export import round_trip
from lockstep.tools import trials


class ReadBack:
    """Stands in for subprocess where an export with a user's code is read in a process of its own."""

    @staticmethod
    def run(command, *, cwd, **_):
        _, _, _, code, *words = command
        assert code == round_trip.FRESH_START
        return warm.run(["warmed", *words], cwd=cwd, timeout=100)


def run(words):
    """Be the process of ReadBack."""
    del sys.path[0]  # the folder of this file
    sys.path.append(words[0])
    sys.argv = ["-c", *words]
    round_trip.read_elsewhere()
    sys.exit()


class Launchers:
    """Stands in for subprocess where the launcher of a trial is started."""

    STDOUT = subprocess.STDOUT

    @staticmethod
    def Popen(command, **options):  # noqa: N802
        _, _, is_module, module, _, *words = command
        assert is_module == "-m"
        return warm.Popen([module, "0", *words], **options)  # 0: it has another parent


@contextmanager
def warm_exports():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_trip, "subprocess", ReadBack)
        yield


@contextmanager
def warm_launchers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "subprocess", Launchers)
        yield
