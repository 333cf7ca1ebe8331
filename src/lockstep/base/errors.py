"""All errors, as a tree; every leaf says what happened and how to fix it.

LockstepError            the base: never raised itself
├── UserError            the user can fix it: shown as one message, without a traceback (exit code 2)
│   ├── ConfigError      the config file or an override on the command line
│   ├── DataError        files of data, their columns, their checksums
│   ├── ModelError       a model that cannot be found, built or exported
│   ├── CheckpointError  nothing to resume from, or not with this recipe
│   ├── LaunchError      processes that cannot be started
│   ├── UntrustedCode    code of somebody else, which is not executed without permission
│   ├── MissingExtra     packages of an optional part of Lockstep that are not installed
│   ├── HubError         the Hugging Face hub cannot be reached, or refuses what is sent
│   └── RemoteStorageError  an object store (s3://, ...) cannot be reached, or refuses
├── EvaluationFailed     the user's code failed in an evaluation (exit code 1, with the traceback of that code)
├── SampleError          the user's code failed on a sample (the same)
├── NonFiniteLoss        training stopped because a loss was NaN or infinite (exit code 3)
├── Desync               the ranks' weights are no longer the same (exit code 4)
│   └── Corruption       a process computes wrongly, as a run of the same shard elsewhere shows
├── PeerLost             another process of the run has exited (exit code 5)
├── HangDetected         no process makes progress; the watchdog thread ends it (exit code 6)
├── RunFailed            a process of a run that lockstep.train() started failed (any other exit code)
└── Interrupted          a signal or a time limit ended the run early; it can be resumed (exit code 75)
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except line breaks and tabs, marks that change the writing direction, and unpaired surrogates."""

URL = re.compile(r"[a-z][a-z0-9+.-]{0,20}://?[^\s\"'<>]+", re.IGNORECASE)
USER = re.compile(r"^([^:]*://?)[^/@]{0,200}:(?!\d+/)[^@]{0,999}@")
QUERY = re.compile(r"([?&][^=&]{0,40}(?:token|sig|secret|key|pass|pwd|auth|cred)[^=&]{0,40}=)[^&]+", re.IGNORECASE)
"""Pattern of a secret in a URL's query. Repetitions are bounded: the time is linear for any text."""


def masked(text: str) -> str:
    """Replace passwords and keys in the URLs of a text by ***."""
    return URL.sub(lambda url: QUERY.sub(r"\1***", USER.sub(r"\1***@", url[0])), text) if ":/" in text else text


def printable(text: str) -> str:
    """Escape the control characters in a text for a terminal, such as a file name may contain: \\x1b; mask secrets."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], masked(text))


class LockstepError(Exception):
    """Base class of all errors that Lockstep raises on purpose."""

    exit_code = 1
    is_shared = False
    """Whether every rank raises it at the same point, so that one of them reports it."""
    rank: int | None = None
    """Rank on which a shared error happened, if on one."""

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(LockstepError):
    """An error that the user can fix; the message says how."""

    exit_code = 2


class ConfigError(UserError):
    """The config file, or an override on the command line, cannot be used."""


class DataError(UserError):
    """Data that is missing, damaged, or not of the form that the config says."""


class ModelError(UserError):
    """A model that cannot be found, built, loaded or exported."""


class CheckpointError(UserError):
    """No usable checkpoint, or one of another recipe."""


class LaunchError(UserError):
    """Processes that cannot be started as requested."""

    def __init__(self, message: str, *, code: str = "LS-RANK-01") -> None:
        """`code`: its name in `lockstep doctor` and in docs/troubleshooting.md."""
        super().__init__(message)
        self.code = code


class UntrustedCode(UserError):
    """Code that this user has not run before, in a folder that somebody else may have made."""


class MissingExtra(UserError):
    """A package that belongs to an optional part of Lockstep is not installed."""


class HubError(UserError):
    """The Hugging Face hub cannot be reached, or refuses what is sent."""


class RemoteStorageError(UserError):
    """An object store cannot be reached, or refuses; or there is nothing at a URL."""


class EvaluationFailed(LockstepError):
    """The user's loss, metric or model raised in an evaluation; the message contains the traceback of that code."""


class SampleError(LockstepError):
    """The data set, or an augmentation, failed on a sample; the message contains the traceback of that code."""


class NonFiniteLoss(LockstepError):
    """Training stopped because a loss was NaN or infinite."""

    exit_code = 3
    is_shared = True


class Desync(LockstepError):
    """The ranks' weights, which must be equal after every step, are not."""

    exit_code = 4
    is_shared = True

    def __init__(self, message: str, equal_at: int) -> None:
        super().__init__(message)
        self.equal_at = equal_at
        """The last step after which the weights were known to be equal."""


class Corruption(Desync):
    """A process computes wrongly: another one gets other gradients from the same samples and weights."""


class PeerLost(LockstepError):
    """Another process of the run has exited, so that this one cannot continue."""

    exit_code = 5


class HangDetected(LockstepError):
    """A process is frozen, or blocks all others."""

    exit_code = 6


class RunFailed(LockstepError):
    """A process of a run that was started from Python failed; the message contains its last output."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(LockstepError):
    """A signal or time limit ended the run early; it can be resumed (75 is EX_TEMPFAIL of sysexits.h)."""

    exit_code = 75
    is_shared = True


def few(names: Iterable[object], most: int = 3) -> str:
    """Join the first names, and count the others."""
    texts = [*map(str, names)]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def nearest(word: str, known: list[str]) -> str:
    """Return ' — did you mean X?' for the most similar known word, ignoring case; else an empty string."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f" — did you mean {by_lower[close[0]]!r}?" if close else ""


def absence(path: Path, what: str) -> str:
    """Describe why a path is no folder with certain contents: it is no folder, or else `what`."""
    if path.is_dir():
        return what
    if path.exists():
        return "it is a file"
    try:
        beside = [each.name for each in path.absolute().parent.iterdir() if each.is_dir()]
    except OSError:
        beside = []
    return f"there is no such folder{nearest(path.name, beside)}"
