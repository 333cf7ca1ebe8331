"""Stacks of all threads of a process, and the line of a stack that is most useful to the user."""

import os
import re
import sys
import sysconfig
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lockstep.base import plugins

OURS = str(plugins.ROOT) + os.sep
FOLDERS = [*(str(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")), *torch.__path__]
LIBRARIES = tuple(f"{Path(folder).resolve()}{os.sep}" for folder in FOLDERS)
DUMPED = re.compile(r'File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class CodeLine:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} `{self.function}`"


def telling(stack: list[CodeLine]) -> CodeLine:
    """Return the most useful line of a stack (innermost first): the innermost in the user's own code, else of all
    code. Its file is relative where it lies in the working directory."""
    users = [line for line in stack if not line.file.startswith((OURS, "<", *LIBRARIES))]
    chosen = (users or stack)[0]
    with suppress(ValueError, OSError):
        return replace(chosen, file=str(Path(chosen.file).relative_to(Path.cwd())))
    return chosen


def stack_of(thread: int) -> list[CodeLine]:
    """Return the stack of a thread, innermost first; empty when it has ended."""
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return []
    with suppress(AttributeError):  # the frame of a call that is just being made may lack its code
        return [CodeLine(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(innermost)]
    return []


def all_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for thread, frame in sys._current_frames().items():
        texts.append(f"thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)


def parsed(dump: str) -> list[CodeLine]:
    """Parse the lines of a stack written by faulthandler, innermost first."""
    return [CodeLine(file, int(line), function) for file, line, function in DUMPED.findall(dump)]
