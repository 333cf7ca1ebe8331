"""Real commands on hostile input: each in a process of its own, forked from a warm one, and how it was answered.

`commands.answer(["train", "c.yaml", "--dry-run"], folder=tmp_path)` runs `lockstep train c.yaml --dry-run` in that
folder; "worker" as the first word is `python -m lockstep.run.worker`: a whole training in this one process. In place of
words there may be a top-level function with its arguments: `answer(function, *args, folder=...)`.
"""

import importlib
import multiprocessing
import os
import pickle
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import warm

SECONDS = 60.0
"""For one input, unless told otherwise: an answer takes a fraction of a second, but the machine may be busy."""
MEMORY_BYTES = 6 << 30
"""That a process may map beyond what the warm one has: what reads /dev/zero to its end fails, and is a traceback."""
GOOD = ("message", "done")
KINDS = (*GOOD, "traceback", "silent", "hang", "executed")
MORE = ("pyarrow.csv", "pyarrow.parquet", "PIL.Image")
"""To be imported beside what any command needs."""
CANARY = "executed"
"""A file that code in an input would make, in the folder of the input."""
TRACEBACK = re.compile(r"^\s*(Traceback \(most recent call last\)|Fatal Python error|Exception ignored )", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """What became of one input."""

    kind: str
    """message: an exit code and words, no traceback; done: exit code 0; traceback; silent: failed without a word;
    hang: over the time; executed: code in the input was run."""
    code: int
    """Exit code; negative: the signal that ended it."""
    output: str
    """stdout and stderr."""
    seconds: float

    @property
    def is_good(self):
        return self.kind in GOOD


def classified(code, output, *, hung, executed):
    """The kind of an answer. A user's own traceback is quoted behind `  | `, and is no traceback of ours."""
    if executed:
        return "executed"
    if hung:
        return "hang"
    if TRACEBACK.search(output) or code < 0:
        return "traceback"
    if code == 0:
        return "done"
    return "message" if output.strip() else "silent"


def table(answers):
    """Of (kind of input, answer) pairs: a line per kind of input with how many were answered how."""
    counts = {}
    for name, answer in answers:
        counts.setdefault(name, Counter())[answer.kind] += 1
    width = max(map(len, [*counts, "input", "all"]))
    rows = {**counts, "all": sum(counts.values(), Counter())}
    lines = [f"{'input':{width}}  tried  {'  '.join(f'{kind:>9}' for kind in KINDS)}"]
    for name, count in rows.items():
        lines.append(f"{name:{width}}  {count.total():5}  {'  '.join(f'{count[kind]:9}' for kind in KINDS)}")
    return "\n".join(lines)


class Commands:
    """The warm process, started when it is first needed."""

    def __init__(self):
        self.process = self.pipe = None

    def answer(self, what, *args, folder, seconds=SECONDS, canary=CANARY):
        """Run a command (a list of words) or a function with `args` in `folder` -> Answer."""
        self._start()
        began = time.monotonic()
        self.pipe.send_bytes(pickle.dumps((what, args, str(folder), seconds)))
        code, output, hung = self.pipe.recv()
        kind = classified(code, output, hung=hung, executed=Path(folder, canary).exists())
        return Answer(kind, code, output, time.monotonic() - began)

    def _start(self):
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs,))
            self.process.start()
            theirs.close()

    def pids(self):
        return {self.process.pid} if self.process else set()

    def close(self):
        if self.process:
            self.process.kill()
            self.process.join()
            self.pipe.close()
        self.process = None


def _serve(pipe):
    """The warm process: fork for every input, wait, and kill what is left of it."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "COLUMNS": "400", "OMP_NUM_THREADS": "1"})
    for name in MORE:
        importlib.import_module(name)
    warm.import_all()
    while True:
        try:
            what, args, folder, seconds = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        with open(os.open("/tmp", os.O_TMPFILE | os.O_RDWR), "w+b") as output:  # noqa: S108 (nameless, in memory or not)
            child = os.fork()
            if child == 0:
                _be(what, args, folder, output.fileno())
            status, hung = _waited(child, seconds)
            output.seek(0)
            text = output.read(1 << 20).decode("utf-8", "backslashreplace")
        pipe.send((os.waitstatus_to_exitcode(status), text, hung))


def _waited(child, seconds):
    """Wait for a process and end what it has started -> its status, and whether it took too long."""
    end, hung = time.monotonic() + seconds, False
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if hung := time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            found = os.waitpid(child, 0)
            break
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return found[1], hung


def _be(what, args, folder, output):
    """The process of one input."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in {0: nothing, 1: output, 2: output}.items():
            os.dup2(target, descriptor)
        sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _code_of(what, args)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code & 0xFF)


def _code_of(what, args):
    """Do it -> exit code."""
    if callable(what):
        return what(*args) or 0
    if what[0] == "worker":
        from lockstep.run import worker

        return worker.main([str(word) for word in what[1:]])
    from lockstep.cli import _app

    return _app.app([str(word) for word in what], prog_name="lockstep")
