"""Random faults in a run with live recovery (make chaos). See faulty_lockstep.py."""

import json
import os
import pathlib
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import faulty_lockstep
import psutil
import torch
import warm
from running import need_forks

from lockstep.checkpoint import layout, reader

RARE = ("rendezvous", "connecting", "sending", "receiving", "placing")
"""Phases that come only after another fault."""
OFTEN = ("forward", "shared-memory", "buffers", "optimizer", "agreement", "after-step")
SHARDED = ("forward", "gather", "scatter", "buffers", "norm", "ready", "applying", "agreement", "after-step")
"""Instead of OFTEN, where several processes hold the weights together."""
SELDOM = ("evaluation", "save", "writing", "renaming")
CRASH = "Fatal Python error"
PATIENCE_SECONDS = 3.0
MOST_SECONDS = 90.0


@dataclass
class Chaos:
    """A run, and the faults that it meets."""

    folder: pathlib.Path
    config: str
    settings: tuple = ()
    seed: int = 0
    processes: int = 3
    spares: int = 0
    often: tuple = OFTEN
    dawdles: bool = False
    """Whether its steps wait until the last fault, so that a few of them last for many faults."""
    counts: Counter = field(default_factory=Counter)
    """(kind, phase) -> how often a process took such an order."""
    number: int = 0
    """Of the newest order."""

    def __post_init__(self):
        self.random = random.Random(self.seed + 1000 * int(os.environ.get("CHAOS_SEED") or 0))

    @property
    def orders(self):
        return self.folder / "orders"

    def start(self):
        need_forks()
        self.orders.mkdir(exist_ok=True)
        if self.dawdles:
            (self.orders / faulty_lockstep.DAWDLE).touch()
        (self.folder / "c.yaml").write_text(self.config)
        command = ["faulty_lockstep", self.orders, "train", "c.yaml", "run.name=live"]
        command += ["launch.recovery=live", f"launch.processes={self.processes}", f"launch.spares={self.spares}"]
        command += ["launch.max_restarts=1000"]
        with open(self.folder / "output.txt", "a") as output:
            self.process = warm.Popen(
                [*command, *self.settings], cwd=self.folder, stdout=output, stderr=subprocess.STDOUT
            )

    def workers(self):
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.name().startswith("lockstep-r"):
                    found.append(process)
        return found

    def order(self, kind, phase):
        self.number += 1
        name = f"{kind}-{phase}-{self.number}"
        (self.orders / name).touch()
        return name

    def is_taken(self, name):
        return (self.orders / f"taken-{name}").exists()

    def fault(self):
        """One random fault; waits until it has happened, or gives it up."""
        kinds = {"one": 20, "double": 4, "resize": 2, "all but one": 1, "all": 0.5, "launcher": 0.5}
        kind = self.random.choices([*kinds], [*kinds.values()])[0]
        if kind not in ("one", "double"):
            self.other_fault(kind)
            self.counts[kind, "any"] += 1
            return
        how = self.random.choices(["kill", "stop", "crash"], [8, 1, 1])[0]
        phase = self.random.choice([*self.often, *self.often, *SELDOM])
        names = {self.order(how, phase): phase}
        if kind == "double":
            second = self.random.choice([*RARE, phase])
            names[self.order("kill", second)] = second
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end and self.process.poll() is None and not all(map(self.is_taken, names)):
            time.sleep(0.01)
        for name, phase in names.items():
            if self.is_taken(name):
                self.counts[name.partition("-")[0], phase] += 1
            with suppress(OSError):
                (self.orders / name).unlink()

    def other_fault(self, kind):
        """All at once, or what somebody asks for; after the loss of the launcher the command is given again."""
        found = self.workers()
        if kind == "resize":
            command = ["lockstep", "resize", "runs/live", str(self.random.randint(2, 4))]
            warm.run(command, cwd=self.folder, timeout=60)
        elif kind == "launcher":
            self.process.kill()
            self.process.wait()
            psutil.wait_procs(found, 30)
            self.start()
        else:
            for process in found[1 if kind == "all but one" else 0 :]:
                with suppress(psutil.Error):
                    process.kill()

    def meet(self, *names):
        """Have the run meet these faults, KIND-PHASE each, and wait until all processes train again."""
        before = len(self.regrouped())
        taken = [self.order(*name.split("-", 1)) for name in names]
        self.wait(lambda: all(map(self.is_taken, taken)), names)
        whole = f"{self.processes} processes now"
        self.wait(lambda: len(lines := self.regrouped()) > before and whole in lines[-1], names)

    def finish(self):
        """No more faults: wait for the run's end -> its exit code."""
        (self.orders / faulty_lockstep.DAWDLE).unlink(missing_ok=True)
        return self.process.wait(300)

    def regrouped(self):
        history = (self.folder / "runs" / "live" / "history.jsonl").read_text()
        return [line for line in history.splitlines() if '"regrouped"' in line]

    def wait(self, condition, what):
        end = time.monotonic() + MOST_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                self.end()
                raise AssertionError((what, self.text(), *self.stacks()))
            time.sleep(0.02)

    def end(self):
        """Also where it hangs."""
        left = []
        with suppress(psutil.Error, subprocess.TimeoutExpired):
            left = [process for process in self.workers() if self.process.poll() is None]
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(10)
            left = []
        for process in left:
            process.kill()
        self.process.kill()
        self.process.wait()

    def text(self):
        return (self.folder / "output.txt").read_text()

    def stacks(self):
        """Of processes that crashed in native code."""
        logs = [file.read_text() for file in (self.folder / "runs").glob("**/rank-*.log")]
        return [text[text.index(CRASH) :] for text in logs if CRASH in text]

    def run(self, faults, pause_seconds):
        """Start the run, let it meet so many faults, and wait for its end -> its exit code."""
        self.start()
        metrics = self.folder / "runs" / "live" / "metrics.jsonl"
        while self.process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        while self.process.poll() is None and sum(self.counts.values()) < faults:
            time.sleep(self.random.uniform(0, 2 * pause_seconds))
            if self.process.poll() is None:
                self.fault()
        try:
            return self.finish()
        finally:
            if self.process.poll() is None:
                self.end()

    def table(self):
        phases = sorted({phase for _, phase in self.counts})
        kinds = sorted({kind for kind, _ in self.counts})
        lines = [f"{'phase':14}" + "".join(f"{kind:>13}" for kind in kinds)]
        for phase in phases:
            lines.append(f"{phase:14}" + "".join(f"{self.counts[kind, phase] or '':>13}" for kind in kinds))
        return "\n".join(lines)


def final_state(run):
    """The digest of a finished run, and every tensor of its last checkpoint: weights, optimizer and averages."""
    summary = json.loads((run / "summary.json").read_text())
    newest = layout.listed(run / "checkpoints")[0]
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in reader.contents(newest).items()}
    reader.load(newest, tensors)
    return summary["digest"], tensors


def undisturbed(folder, config, settings=()):
    """The final state of the run on one process."""
    (folder / "plain.yaml").write_text(config)
    command = ["lockstep", "train", "plain.yaml", "run.name=plain", "launch.processes=1"]
    done = warm.run([*command, *settings], cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr
    return final_state(folder / "runs" / "plain")


def differences(one, other):
    """The names of what differs between two final states."""
    (digest, tensors), (other_digest, others) = one, other
    assert tensors.keys() == others.keys()
    different = [name for name in tensors if not torch.equal(tensors[name], others[name])]
    return [*(["digest"] if digest != other_digest else []), *different]


DIGITS = """
data: {kind: digits}
model: {kind: cnn}
optim: {lr: 0.001, clip: 1.0}
train: {global_batch: 32, micro_batch: 8, epochs: null, steps: 2000, ema: 0.99}
evaluate: {every_steps: 20}
checkpoint: {every_steps: 25}
observe: {log_every: 5}
"""
TEXTS = """
data: {kind: ag_news, root: DATA, limit: 2000}
model: {kind: transformer, name: MINILM, max_length: 32}
train: {global_batch: 32, micro_batch: 8, epochs: null, steps: 250}
evaluate: {every_steps: 50, limit: 100}
checkpoint: {every_steps: 50}
observe: {log_every: 5}
"""
MNIST = """
data: {kind: mnist, root: DATA, limit: 20000}
model: {kind: cnn}
train: {global_batch: 64, micro_batch: 8, epochs: null, steps: 2000}
evaluate: {every_steps: 100, limit: 1000}
checkpoint: {every_steps: 50}
observe: {log_every: 10}
"""
