"""Why a run's processes ended: which of them was the first, what befell it, and its last words."""

import json
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lockstep.base.errors import Desync, HangDetected, Interrupted, NonFiniteLoss, PeerLost, UserError
from lockstep.base.user_code import MARK, signature

TAIL_LINES = 20
VERDICT = "verdict.json"
"""What the thread that watches leaves in the folder of logs: {"rank", "text"}."""
SAID = {UserError.exit_code, NonFiniteLoss.exit_code, Desync.exit_code, Interrupted.exit_code}
"""Exit codes of errors that all ranks share, or that one has explained in words: no start would end in another way."""
SIGNALS = {
    "SIGKILL": "was killed (SIGKILL: kill -9, or a scheduler)",
    "SIGSEGV": "crashed in native code (SIGSEGV: a segmentation fault)",
    "SIGABRT": "crashed in native code (SIGABRT: abort)",
    "SIGBUS": "crashed in native code (SIGBUS; where /dev/shm is full, too)",
    "SIGILL": "crashed in native code (SIGILL: an instruction that this processor lacks)",
    "SIGFPE": "crashed in native code (SIGFPE)",
}
ENDED = (-signal.SIGTERM, -signal.SIGINT)
"""By the agent, when another had failed."""
SIGKILL = 9
"""Windows has no name for it."""
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "can't allocate memory", "CUDA out of memory")
LESS_MEMORY = "lower train.micro_batch, or run fewer processes"
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Failure:
    code: int
    """Exit code; negative: the signal that ended it."""
    text: str
    """What happened, for people, with its last words where they are not on the terminal already."""
    weight: int
    """Of two failures the one with the smaller weight is the cause of the other."""
    alike: str = ""
    """The same as of another that befell the run in the same way, where it is an exception; else empty."""

    @property
    def was_killed(self) -> bool:
        """Whether a signal, a crash in native code or the watching thread ended it: another start may fare better."""
        return self.code < 0 or self.code in (PeerLost.exit_code, HangDetected.exit_code)

    @property
    def is_final(self) -> bool:
        return self.code in SAID

    @property
    def exit_code(self) -> int:
        """For the launcher, as shells count signals."""
        return self.code if self.code > 0 else 128 - self.code


def failure_of(error: ChildFailedError, logs: Path, oom_kills_before: int) -> Failure:
    """What happened. A process that was killed comes before those who lost it, and those come last. Of those that
    failed by themselves the one that recorded why comes first."""
    rank, first = min(
        error.failures.items(),
        key=lambda item: (_weight(item[1]), not Path(item[1].error_file).is_file(), _time(item[1])),
    )
    has_told = Path(first.error_file).is_file()
    if has_told and first.exitcode in ENDED:
        first.exitcode = 1
    code = first.exitcode
    has_spoken = code in SAID and (rank == 0 or not has_told)  # rank 0 has, on the terminal
    if has_spoken:
        return Failure(code=code, text="", weight=_weight(first))
    lines = _watched(logs) if code in (PeerLost.exit_code, HangDetected.exit_code) or code == -SIGKILL else []
    lines.append(f"rank {rank} (process {first.pid}) {_fate(first, oom_kills_before)}")
    log = logs / f"rank-{rank}.log"
    if rank and log.is_file():
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        lines += (
            [f"last lines of {log}:", *(line if line.startswith(MARK) else MARK + line for line in tail)]
            if tail
            else []
        )
    return Failure(code=code, text="\n".join(lines), weight=_weight(first), alike=_alike(first) if has_told else "")


def lost(text: str) -> Failure:
    """A machine that is gone, and with it its processes."""
    return Failure(code=PeerLost.exit_code, text=text, weight=0)


def _time(failure: ProcessFailure) -> float:
    """When it happened: the agent's times are whole seconds, those of files are not."""
    with suppress(OSError):
        return Path(failure.error_file).stat().st_mtime
    return failure.timestamp


def _alike(failure: ProcessFailure) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads(Path(failure.error_file).read_text(encoding="utf-8"))["message"]
        return signature(said["message"], said["extraInfo"]["py_callstack"])
    return ""


def _weight(failure: ProcessFailure) -> int:
    """Causes before their consequences. A process that has failed by itself may end by the SIGTERM that follows."""
    code = failure.exitcode
    if Path(failure.error_file).is_file():
        return 2
    if code < 0:
        return 0 if code not in ENDED else 4
    return {HangDetected.exit_code: 1, PeerLost.exit_code: 3}.get(code, 2)


def _fate(failure: ProcessFailure, oom_kills_before: int) -> str:
    code = failure.exitcode
    if code == -SIGKILL and oom_kills() > oom_kills_before:
        return f"was killed for want of memory (SIGKILL by the kernel's out-of-memory killer): {LESS_MEMORY}"
    if code < 0:
        name = signal.Signals(-code).name
        return SIGNALS.get(name, f"was ended by signal {name}")
    if code == HangDetected.exit_code:
        return "ended the run, since it could not go on"
    if code == PeerLost.exit_code:
        return "lost the connection to another process"
    said = str(failure.message)
    if any(word in said for word in OUT_OF_MEMORY):
        return f"ran out of memory (exit code {code}): {LESS_MEMORY}"
    return f"failed with an exception (exit code {code})" if code == 1 else f"ended with exit code {code}"


def _watched(logs: Path) -> list[str]:
    """What the thread that watches has found out, where it could not say so on the terminal."""
    with suppress(OSError, ValueError, KeyError):
        verdict = json.loads((logs / VERDICT).read_text(encoding="utf-8"))
        if verdict["rank"] != 0:
            return [str(verdict["text"])]
    return []


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory: on this machine, and in this control group, whose
    kills not every machine's count holds."""
    counts = [_counted(_text(Path("/proc/vmstat")))]
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        group = path.lstrip("/")
        if "memory" in controllers:
            counts.append(_counted(_text(CGROUPS / "memory" / group / "memory.oom_control")))
        elif not controllers:
            counts.append(_counted(_text(CGROUPS / group / "memory.events")))
    return sum(counts)


def _counted(text: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
