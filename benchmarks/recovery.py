"""What the loss of a process costs: live recovery, without and with a spare, against a restart from a checkpoint of
every step or two.

    python benchmarks/recovery.py [--data FOLDER] [--processes 2] [--faults 50] [--seconds 3] [--rounds 4]
                                  [--pairs 40] [--set parallel.kind=fsdp ...]

A random process is killed (SIGKILL) once all train, and the spare is loaded. `stall`: from the kill to the next step
of the others that metrics.jsonl shows; `whole`: until the first step of all processes.

Then the cost per step without faults, of a run with live recovery and one without, in turns of a few seconds, while all
processes of the other are stopped (SIGSTOP): what else the machine does, and how fast it is, changes slowly, and so is
the same for both. In many pairs of runs, since two equal runs differ as well (by 2 % here); the first to start is the
other one in every second pair, since it is slower (by 1 %). The seconds of a step, and the processor time of a step, of
the launcher and all its processes. What the launcher and the threads beside the training use is told by itself, in
percent of a core.

`--data` has mnist/; without it the CNN trains on scikit-learn's digits. Run nothing else beside it.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from measured_at import measured_at

POLL_SECONDS = 0.002
PATIENCE_SECONDS = 60.0
SPARE_SECONDS = 1.0
BUSY_SECONDS = 0.2
"""Of processor time, meanwhile: a spare that uses less has loaded everything."""
FAULTS_OF_A_RUN = 20
"""After more, a process that is lost again waits for longer and longer."""
MANY = 10**6
"""More steps than a run trains."""
WARM_STEPS = 50


@dataclass(frozen=True)
class Used:
    """What a run has used so far."""

    steps: int
    seconds: float
    processor: float
    """Seconds of the launcher and all threads of the workers."""
    beside: float
    """Those of the launcher, and of the workers' threads besides the first."""

    def __sub__(self, other: "Used") -> "Used":
        return Used(**{name: value - vars(other)[name] for name, value in vars(self).items()})

    def __add__(self, other: "Used") -> "Used":
        return Used(**{name: value + vars(other)[name] for name, value in vars(self).items()})


class Run:
    """A training that logs every step."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        recovery: str,
        options: argparse.Namespace,
        spares: int = 0,
        saves: int = MANY,
        settings: Sequence[str] = (),
    ) -> None:
        source = {"kind": "mnist", "root": str(options.data)} if options.data else {"kind": "digits"}
        config = {
            "data": source,
            "model": {"kind": "cnn"},
            "train": {"global_batch": 64, "micro_batch": 8, "epochs": None, "steps": MANY},
            "launch": {"processes": options.processes, "recovery": recovery, "spares": spares, "max_restarts": MANY},
            "observe": {"log_every": 1, "sinks": ["jsonl"]},
            "evaluate": {"every_steps": MANY, "limit": 100},
            "checkpoint": {"every_steps": saves},
        }
        (folder / f"{name}.yaml").write_text(json.dumps(config))
        self.folder, self.processes, self.spares = folder / "runs" / name, options.processes, spares
        command = [sys.executable, "-m", "lockstep", "train", f"{name}.yaml", f"run.name={name}", *settings]
        command += options.set
        self.output = folder / f"{name}.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)

    def workers(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if child.name().startswith("lockstep-r"):
                    found.append(child)
        return found

    def signal_all(self, number: signal.Signals) -> None:
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            process.send_signal(number)

    def training_workers(self) -> list[psutil.Process]:
        """Those that use the processor, once the spares wait."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self.spares and time.monotonic() < end:
            before = {process: sum(process.cpu_times()[:2]) for process in self.workers()}
            time.sleep(SPARE_SECONDS)
            busy = [each for each, seconds in before.items() if sum(each.cpu_times()[:2]) - seconds > BUSY_SECONDS]
            if (len(busy), len(before)) == (self.processes, self.processes + self.spares):
                return busy
        return self.workers()

    def lines(self) -> int:
        """Of metrics.jsonl: it only grows by a line when a step has ended."""
        with suppress(OSError):
            return (self.folder / "metrics.jsonl").stat().st_size
        return 0

    def steps(self) -> int:
        """Of metrics.jsonl."""
        with suppress(OSError):
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def used(self) -> "Used":
        launcher = psutil.Process(self.process.pid)
        beside = total = sum(launcher.cpu_times()[:2])
        for worker in self.workers():
            for thread in worker.threads():
                seconds = thread.user_time + thread.system_time
                total, beside = total + seconds, beside + (seconds if thread.id != worker.pid else 0.0)
        return Used(steps=self.steps(), seconds=time.monotonic(), processor=total, beside=beside)

    def changes(self) -> list[dict]:
        """The lines of its history on starts and on changes of its processes."""
        lines = (self.folder / "history.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if '"kind": "started"' in line or '"kind": "regrouped"' in line]

    def is_whole(self, before: int) -> bool:
        """Whether all processes train again, after so many lines."""
        *_, last = lines = self.changes()
        words = f"{self.processes} processes now"
        return len(lines) > before and (last["kind"] == "started" or words in last["message"])

    def wait(self, condition) -> float:
        """Seconds until a condition holds."""
        began = time.monotonic()
        while not condition():
            seconds = time.monotonic() - began
            if self.process.poll() is not None or seconds > PATIENCE_SECONDS:
                raise SystemExit(f"{self.folder} does not go on\n{self.output.read_text()[-2000:]}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def kill_one(self, chosen: random.Random) -> tuple[float, float]:
        """Kill a process that trains -> seconds until the next step, and until all train again."""
        training = self.training_workers()
        changes, began = len(self.changes()), time.monotonic()
        chosen.choice(training).kill()
        self.wait(lambda: len(self.changes()) > changes)
        before = self.lines()
        self.wait(lambda: self.lines() != before)
        stall = time.monotonic() - began
        self.wait(lambda: self.is_whole(changes))
        before = self.lines()
        self.wait(lambda: self.lines() > before)
        return stall, time.monotonic() - began

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def faults(folder: Path, options: argparse.Namespace, *, recovery: str, spares: int) -> dict[str, list[float]]:
    """Seconds of each stall, and until all processes train again."""
    chosen, measured = random.Random(0), list[tuple[float, float]]()
    while left := options.faults - len(measured):
        name = f"faults-{recovery}-{spares}-{left}"
        saves = 2 if recovery == "restart" else MANY
        run = Run(folder, name, recovery=recovery, options=options, spares=spares, saves=saves)
        run.wait(lambda run=run: run.lines() > 0)
        for _ in range(min(left, FAULTS_OF_A_RUN)):
            time.sleep(chosen.uniform(0.2, 0.6))
            measured.append(run.kill_one(chosen))
        run.end()
    stalls, whole = zip(*measured, strict=True)
    return {"stall": list(stalls), "whole": list(whole)}


def cost(folder: Path, options: argparse.Namespace) -> None:
    """Print what live recovery costs a run without faults."""
    patient = {"live": f"launch.heartbeat_seconds={MANY}", "restart": f"launch.failure_timeout_seconds={MANY}"}
    found: dict[str, list[Used]] = {recovery: [] for recovery in patient}
    ratios: dict[str, list[float]] = {"seconds": [], "processor": []}
    for pair in range(options.pairs):
        runs = dict[str, Run]()
        for recovery in sorted(patient, reverse=bool(pair % 2)):
            name, settings = f"{recovery}-{pair}", [patient[recovery]]
            runs[recovery] = run = Run(folder, name, recovery=recovery, options=options, settings=settings)
            run.wait(lambda run=run: run.steps() >= WARM_STEPS)
            run.signal_all(signal.SIGSTOP)
        used = in_turns(runs, options)
        for recovery, each in used.items():
            found[recovery].append(each)
        for what, values in ratios.items():
            a_step = {recovery: vars(each)[what] / each.steps for recovery, each in used.items()}
            values.append(a_step["live"] / a_step["restart"])
        say(f"pair {pair}: live / restart, a step's " + ", ".join(f"{what} {v[-1]:.4f}" for what, v in ratios.items()))
    for recovery, used in found.items():
        total = sum(used[1:], used[0])
        say(
            f"{recovery:7}: {total.steps} steps, {1000 * total.seconds / total.steps:.3f} ms each, "
            f"{1000 * total.processor / total.steps:.3f} ms of processor; "
            f"{100 * total.beside / total.seconds:.2f} % of a core beside training"
        )
    for what, values in ratios.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        say(
            f"{what} of a step, live / restart, of {len(values)} pairs: mean {statistics.mean(values):.4f} "
            f"(standard error {error:.4f}), median {statistics.median(values):.4f}"
        )


def in_turns(runs: Mapping[str, Run], options: argparse.Namespace) -> dict[str, Used]:
    """Let each of two runs train while the other one is stopped; end them, and return what each used."""
    used = dict.fromkeys(runs, Used(0, 0.0, 0.0, 0.0))
    for number in range(options.rounds):
        for recovery in sorted(runs, reverse=bool(number % 2)):
            run, before = runs[recovery], runs[recovery].used()
            began = time.monotonic()
            run.signal_all(signal.SIGCONT)
            time.sleep(options.seconds)
            run.signal_all(signal.SIGSTOP)
            used[recovery] += replace(run.used() - before, seconds=time.monotonic() - began)
    for run in runs.values():
        run.signal_all(signal.SIGCONT)
        run.end()
    return used


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--set", nargs="*", default=[])
    options = parser.parse_args()
    options.data = options.data and options.data.resolve()
    say(f"Figures {measured_at()}.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for recovery, spares in (("live", 0), ("live", 1), ("restart", 0)) if options.faults else ():
            for what, seconds in faults(folder, options, recovery=recovery, spares=spares).items():
                p99 = sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]
                with_spare = ", a spare" if spares else ""
                say(f"{recovery + with_spare:14} {what:6} median {statistics.median(seconds):.2f} s, p99 {p99:.2f} s")
        if options.rounds:
            cost(folder, options)


if __name__ == "__main__":
    main()
