"""A command that works for long says something within a second, on a terminal."""

import os
import pty
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import time
from lockstep.base import loading_line
from lockstep.base.escaping_console import EscapingConsole

loading_line.arm()
if "speaks" in sys.argv:
    EscapingConsole().print("first")
time.sleep(1.2)
EscapingConsole().print("done")
"""


def said(*arguments):
    """What a script writes to its terminal."""
    terminal, other = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stdin=other, stdout=other, stderr=other)
    os.close(other)
    text = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            text += chunk
    except OSError:  # the process has ended
        pass
    finally:
        os.close(terminal)
    assert process.wait(timeout=30) == 0
    return text.decode().split()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], ["loading", "...", "done"]), (["speaks"], ["first", "done"])],
    ids=["silent", "speaks"],
)
def test_only_silence_is_broken(arguments, words):
    assert said(*arguments) == words


def test_where_there_is_no_terminal_nothing_is_added():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
