"""Preloaded in multiprocessing's fork server: a process that it forks for a parent that has ended exits silently.

A parent asks for a process, then sends its task; if it ends in between, as by Ctrl-C, Python would print a traceback.
"""

import pickle
import sys
import traceback
from multiprocessing import spawn
from types import TracebackType


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    frames = [frame.f_code for frame, _ in traceback.walk_tb(trace)]
    is_receiving = frames[-1:] == [spawn._main.__code__]
    if not (is_receiving and isinstance(error, EOFError | pickle.UnpicklingError)):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _report
