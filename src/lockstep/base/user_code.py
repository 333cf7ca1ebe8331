"""Errors of the code that a user brings: whose they are, what was being done, and how they are told."""

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.base import errors
from lockstep.base.escaping import named

ROOT = Path(__file__).parents[1]
LIBRARIES = tuple(
    f"{path}/" for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
PLACES = {
    ("models/_user.py", "build"): ("model.file", "while the model was built"),
    ("models/_user.py", "forward"): ("model.file", "in the forward pass"),
    ("models/_user.py", "loss"): ("model.file", "in the loss"),
    ("models/_user.py", "own_blocks"): ("model.file", "while its blocks were asked for"),
    ("models/_user.py", "metrics"): ("model.file", "while its metrics were made"),
    ("data/sources/_user.py", "build"): ("data.file", "while the data was opened"),
    ("data/augment.py", "augmented"): ("data.augment", "while its function was looked for"),
    ("run/tasks/train.py", "subscribe_observers"): ("observe.file", "while its observers were made"),
}
"""Where code of ours calls theirs: (file, function) -> the setting that names it, and what is done. An error below that
has no line of the user's is theirs all the same: a file that cannot be read, layers that do not fit together."""
IMPORT = ("base/plugins.py", "load_file")
UNKNOWN = ("your code", "during the run")
MOST_FRAMES = 12
"""Of a recursion, so many of the first calls are shown, and of the last."""
MOST_LINES = 80
MOST_CHARACTERS = 1000
"""Of a line: a message may hold a whole tensor."""
MARK = "  | "
STEP = re.compile(r"^in step \d+$", re.MULTILINE)
CALL = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    """A call on the way to an error."""

    file: str
    function: str

    @property
    def own(self) -> str | None:
        """Which file of Lockstep it is in, if so."""
        path = Path(self.file)
        return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None

    @property
    def place(self) -> tuple[str, str]:
        """File and function, as in PLACES."""
        return self.own or "", self.function

    @property
    def is_users(self) -> bool:
        """Whether it is neither Lockstep's, nor of a library, nor made up."""
        return self.own is None and not self.file.startswith(("<", *LIBRARIES))


def calls(error: BaseException) -> list[Frame]:
    """The way to an error, outermost first."""
    found = [Frame(f.f_code.co_filename, f.f_code.co_name) for f, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        found.append(Frame(error.filename, "<module>"))
    return found


def is_users(error: BaseException) -> bool:
    """Whether an error comes from the user's code: of all lines that are ours or theirs, theirs was the last; or ours
    had just called theirs."""
    known = [frame for frame in calls(error) if frame.own or frame.is_users]
    return bool(known) and (known[-1].is_users or known[-1].place in PLACES or known[-1].place == IMPORT)


def report(error: BaseException) -> str:
    """An error of the user's code as one message: what was being done, and the traceback in their own frames."""
    way = calls(error)
    setting, doing = next((PLACES[frame.place] for frame in reversed(way) if frame.place in PLACES), UNKNOWN)
    if any(frame.place == IMPORT for frame in way):
        doing = "while it was imported"
    theirs = next((named(Path(frame.file).name) for frame in way if frame.is_users), "the file")
    return f"{setting}: {theirs} failed {doing}:\n{quoted(error)}"


def quoted(error: BaseException) -> str:
    """The traceback of an error, each line behind a mark: in the user's own frames where there are any."""
    told = traceback.TracebackException.from_exception(error, limit=None)
    for each in _with_causes(told):
        _narrow(each)
    lines = [line for part in told.format() for line in part.rstrip("\n").split("\n")]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - MOST_LINES} lines are left out ...", *lines[-half:]]
    return "\n".join(MARK + _short(line) for line in lines)


@contextmanager
def noted(step: int) -> Iterator[None]:
    """An error inside says in which step, from 1, it was raised."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in step {step}")
        raise


def alike(message: str, traceback_text: str) -> str:
    """What is the same of two errors that befell a run in the same way: the kind, the step, and the lines of code on
    the way to it, the user's where there are any. Of an error of Lockstep's own also its words, which name samples."""
    kind, lines = message.partition(":")[0], CALL.findall(traceback_text)
    theirs = [line for line in lines if Frame(line[0], line[2]).is_users]
    words = message if hasattr(errors, kind) else ""
    places = [f"{file}:{number}" for file, number, _ in theirs or lines]
    return "\n".join([kind, words, *STEP.findall(traceback_text), *places])


def _short(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."


def _with_causes(told: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    each: traceback.TracebackException | None = told
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


def _narrow(told: traceback.TracebackException) -> None:
    frames = list(told.stack)
    theirs = [f for f in frames if Frame(f.filename, f.name).is_users]
    if not theirs:  # from the last line of ours on
        last = max((i for i, f in enumerate(frames) if Frame(f.filename, f.name).own), default=-1)
        theirs = frames[last + 1 :] or frames
    if len(theirs) > 2 * MOST_FRAMES:
        theirs = [*theirs[:MOST_FRAMES], *theirs[-MOST_FRAMES:]]
    told.stack = traceback.StackSummary.from_list(theirs)
