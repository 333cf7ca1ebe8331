"""Why a run's workers exited: which of them failed first, how, and its last output."""

import json
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.base import storage, user_code
from lockstep.base.errors import Desync, HangDetected, Interrupted, NonFiniteLoss, PeerLost, UserError
from lockstep.base.user_code import MARK
from lockstep.core.host.memory_meter import oom_kills
from lockstep.observe.diagnose.hang_watch import VERDICT

TAIL_LINES = 20
CRASH = "Fatal Python error: "
"""Beginning of faulthandler's report, before the stacks."""
BEFORE_CRASH = 5
"""Lines of output shown before the stack of a crash."""
EXPLAINED = {UserError.exit_code, NonFiniteLoss.exit_code, Desync.exit_code, Interrupted.exit_code}
"""Exit codes of errors that all ranks share or one has explained: a restart would end in the same way."""
SIGNALS = {
    "SIGKILL": "was killed (SIGKILL: kill -9, or a scheduler)",
    "SIGSEGV": "crashed in native code (SIGSEGV: a segmentation fault)",
    "SIGABRT": "crashed in native code (SIGABRT: abort)",
    "SIGBUS": "crashed in native code (SIGBUS; also when /dev/shm is full)",
    "SIGILL": "crashed in native code (SIGILL: an instruction that this processor lacks)",
    "SIGFPE": "crashed in native code (SIGFPE)",
}
TERMINATED = (-signal.SIGTERM, -signal.SIGINT)
"""Exit codes of workers that the launcher terminated after another one had failed."""
SIGKILL = 9
"""Number of the signal, for which Windows has no name."""
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "can't allocate memory", "CUDA out of memory")
LESS_MEMORY = "lower train.micro_batch, or run fewer processes"


@dataclass(frozen=True, kw_only=True)
class Failure:
    code: int
    """Exit code; negative: the signal that ended it."""
    text: str
    """Message for the user, with the last output unless it is on the terminal already."""
    priority: int
    """Order of causes: of two failures, the one with the smaller priority caused the other."""
    signature: str = ""
    """Key of an exception, equal for two that were raised in the same way at the same lines."""

    @property
    def was_killed(self) -> bool:
        """Whether a signal, a crash in native code or the watchdog ended it: a restart may succeed."""
        return self.code < 0 or self.code in (PeerLost.exit_code, HangDetected.exit_code)

    @property
    def is_final(self) -> bool:
        return self.code in EXPLAINED

    @property
    def exit_code(self) -> int:
        """Exit code of the launcher; signals count as in a shell."""
        return self.code if self.code > 0 else 128 - self.code


def failure_of(failures: Mapping[int, ProcessFailure], logs: Path, oom_kills_before: int) -> Failure:
    """Return the root cause among the failed workers, by rank. One that was killed comes before those that lost their
    connection to it; of those that raised, the one that recorded its exception first."""
    rank, first = min(
        failures.items(),
        key=lambda item: (_priority(item[1]), not Path(item[1].error_file).is_file(), _time(item[1])),
    )
    has_error_file = Path(first.error_file).is_file()
    if has_error_file and first.exitcode in TERMINATED:
        first.exitcode = 1
    code = first.exitcode
    if code in EXPLAINED and (rank == 0 or not has_error_file):  # rank 0 has explained it, on the terminal
        return Failure(code=code, text="", priority=_priority(first))
    lines = _watchdog_report(logs) if code in (PeerLost.exit_code, HangDetected.exit_code, -SIGKILL) else []
    lines.append(f"rank {rank} (process {first.pid}) {_description(first, oom_kills_before)}")
    log = logs / f"rank-{rank}.log"
    if rank and log.is_file():
        tail = _last_lines(log)
        if tail:
            lines.append(f"last lines of {log}:")
        lines += (line if line.startswith(MARK) else MARK + line for line in tail)
    signature = _signature(first) if has_error_file else ""
    return Failure(code=code, text="\n".join(lines), priority=_priority(first), signature=signature)


def _last_lines(log: Path) -> list[str]:
    """Return the end of a log; of a crash in native code the stack of the thread that crashed."""
    output, crash, stacks = storage.tail(log).rpartition(CRASH)
    if not crash:
        return stacks.splitlines()[-TAIL_LINES:]
    kind, _, others = stacks.partition("\n\n")
    _, current, stack = others.partition("Current thread")
    stack = (current + stack if current else others).partition("\n\n")[0]
    before = [line for line in output.splitlines() if line.strip()][-BEFORE_CRASH:]
    return [*before, crash + kind, *stack.splitlines()[:TAIL_LINES]]


def node_failure(text: str) -> Failure:
    """Return the failure of a node that is lost, with its workers."""
    return Failure(code=PeerLost.exit_code, text=text, priority=0)


def _time(failure: ProcessFailure) -> float:
    """Return when it failed: recorded timestamps are whole seconds, modification times are not."""
    with suppress(OSError):
        return Path(failure.error_file).stat().st_mtime
    return failure.timestamp


def _signature(failure: ProcessFailure) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        message = json.loads(Path(failure.error_file).read_text(encoding="utf-8"))["message"]
        return user_code.signature(message["message"], message["extraInfo"]["py_callstack"])
    return ""


def _priority(failure: ProcessFailure) -> int:
    """Order causes before their consequences: a worker that raised may have been ended by the SIGTERM that followed."""
    code = failure.exitcode
    if Path(failure.error_file).is_file():
        return 2
    if code < 0:
        return 0 if code not in TERMINATED else 4
    return {HangDetected.exit_code: 1, PeerLost.exit_code: 3}.get(code, 2)


def _description(failure: ProcessFailure, oom_kills_before: int) -> str:
    code = failure.exitcode
    if code < 0:
        return death(code, oom_kills_before)
    if code == HangDetected.exit_code:
        return "ended the run, since it could not go on"
    if code == PeerLost.exit_code:
        return "lost the connection to another process"
    message = str(failure.message)
    if any(text in message for text in OUT_OF_MEMORY):
        return f"ran out of memory (exit code {code}): {LESS_MEMORY}"
    return f"failed with an exception (exit code {code})" if code == 1 else f"ended with exit code {code}"


def death(code: int, oom_kills_before: int) -> str:
    """Describe what ended a process with a negative exit code."""
    if code == -SIGKILL and oom_kills() > oom_kills_before:
        return f"ran out of memory (SIGKILL by the kernel's out-of-memory killer): {LESS_MEMORY}"
    name = signal.Signals(-code).name
    return SIGNALS.get(name, f"was ended by signal {name}")


def _watchdog_report(logs: Path) -> list[str]:
    """Return the report of the watchdog thread, unless it is on the terminal."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        verdict = storage.read_json(logs / VERDICT)
        if verdict["rank"] != 0:
            return [str(verdict["text"])]
    return []
