"""Errors raised by the user's code: recognising them, and reporting them with the user's own frames."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.base import errors
from lockstep.base.escaping_console import escape_name

ROOT = Path(__file__).parents[1]
LIBRARIES = tuple(
    f"{path}/" for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
COMPILED = "torchinductor_"
"""Prefix of the folder in which torch.compile writes Python."""
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages, also of an environment that this one builds on (--system-site-packages)."""
CALL_SITES = {
    ("models/_user.py", "build"): ("model.file", "while the model was built"),
    ("models/_user.py", "forward"): ("model.file", "in the forward pass"),
    ("models/_own_functions.py", "own_loss"): ("model.file", "in the loss"),
    ("models/_user.py", "own_blocks"): ("model.file", "while its blocks were listed"),
    ("models/_own_functions.py", "own_metrics"): ("model.file", "while its metrics were made"),
    ("data/sources/_user.py", "build"): ("data.file", "while the data was opened"),
    ("data/augment.py", "augmented"): ("data.augment", "while its function was looked for"),
    ("training/learning_rate.py", "own"): ("schedule.file", "in its schedule"),
    ("training/optim.py", "build_own"): ("optim.file", "while its optimizer was made"),
    ("run/tasks/train.py", "subscribe_observers"): ("observe.file", "while its observers were made"),
}
"""Functions of Lockstep that call the user's code: (file, function) -> the setting that names it, what it is doing.

An error raised below one of them is the user's even without a frame of theirs: a file that cannot be read, layers whose
shapes do not match."""
IMPORT = ("base/plugins.py", "load_file")
UNKNOWN = ("your code", "during the run")
MOST_FRAMES = 12
"""Number of the first, and of the last, frames of a recursion that are shown."""
MOST_LINES = 80
MOST_CHARACTERS = 1000
"""Length limit of a line: a message may contain a whole tensor."""
MARK = "  | "
STEP = re.compile(r"^in step \d+$", re.MULTILINE)
CALL = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    """A frame of a traceback."""

    file: str
    function: str

    @property
    def own_file(self) -> str | None:
        """The file of Lockstep that it is in, if any, relative to the package."""
        path = Path(self.file)
        return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None

    @property
    def site(self) -> tuple[str, str]:
        """File and function, as in CALL_SITES."""
        return self.own_file or "", self.function

    @property
    def is_users(self) -> bool:
        """Whether it is in neither Lockstep, a library, nor generated code."""
        is_library = self.file.startswith(("<", *LIBRARIES)) or not INSTALLED.isdisjoint(Path(self.file).parts)
        return self.own_file is None and not is_library and not self.is_compiled

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile has written its file, into its cache."""
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # noqa: TID251 (a variable of torch's)
        path = Path(self.file)
        return bool(cache and path.is_relative_to(cache)) or any(part.startswith(COMPILED) for part in path.parts)


def frames_of(error: BaseException) -> list[Frame]:
    """List the frames of an error, outermost first."""
    frames = [Frame(f.f_code.co_filename, f.f_code.co_name) for f, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(Frame(error.filename, "<module>"))
    return frames


def is_from_user(error: BaseException) -> bool:
    """Return whether the user's code raised an error: libraries aside, its last frame is theirs, or one of ours that
    calls theirs."""
    frames = [frame for frame in frames_of(error) if frame.own_file or frame.is_users]
    return bool(frames) and (frames[-1].is_users or frames[-1].site in CALL_SITES or frames[-1].site == IMPORT)


def report(error: BaseException) -> str:
    """Describe an error of the user's code: what it was doing, and a traceback of the user's frames."""
    frames = frames_of(error)
    setting, doing = next((CALL_SITES[frame.site] for frame in reversed(frames) if frame.site in CALL_SITES), UNKNOWN)
    if any(frame.site == IMPORT for frame in frames):
        doing = "while it was imported"
    file = next((escape_name(Path(frame.file).name) for frame in frames if frame.is_users), "the file")
    return f"{setting}: {file} failed {doing}:\n{format_traceback(error)}"


def format_traceback(error: BaseException) -> str:
    """Format the traceback of an error, reduced to the user's frames where there are any; each line is marked."""
    formatted = traceback.TracebackException.from_exception(error, limit=None)
    each: traceback.TracebackException | None = formatted
    while each is not None:
        _keep_user_frames(each)
        each = each.__cause__ or each.__context__
    lines = [line for block in formatted.format() for line in block.rstrip("\n").split("\n")]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - MOST_LINES} lines are left out ...", *lines[-half:]]
    lines = [line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..." for line in lines]
    return "\n".join(MARK + line for line in lines)


@contextmanager
def noting_step(step: int) -> Iterator[None]:
    """Add the number of the step, from 1, to any error raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in step {step}")
        raise


def signature(message: str, traceback_text: str) -> str:
    """Return a text that is equal for two failures with the same cause: error type, step, and lines of code in the
    traceback, reduced to the user's if any. For errors of Lockstep also the message, which names samples."""
    kind, calls = message.partition(":")[0], CALL.findall(traceback_text)
    user_calls = [call for call in calls if Frame(call[0], call[2]).is_users]
    lines = [f"{file}:{number}" for file, number, _ in user_calls or calls]
    return "\n".join([kind, message if hasattr(errors, kind) else "", *STEP.findall(traceback_text), *lines])


def _keep_user_frames(error: traceback.TracebackException) -> None:
    frames = list(error.stack)
    kept = [f for f in frames if Frame(f.filename, f.name).is_users]
    if not kept:  # those after the last of ours
        last = max((i for i, f in enumerate(frames) if Frame(f.filename, f.name).own_file), default=-1)
        kept = frames[last + 1 :] or frames
    if len(kept) > 2 * MOST_FRAMES:
        kept = [*kept[:MOST_FRAMES], *kept[-MOST_FRAMES:]]
    error.stack = traceback.StackSummary.from_list(kept)
