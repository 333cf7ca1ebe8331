"""Lockstep beside other trainers: same model, data, precision and processes, in turns, in one run.

    benchmarks/peers/install.sh
    python benchmarks/compare.py --data FOLDER --model MINILM [--works mnist-64 minilm-32] [--rounds 5]
                                    [--precision fp32] --out FILE

FOLDER holds mnist/ and ag_news/; MINILM a sentence-transformers/all-MiniLM-L6-v2. Every contender is a command that
trains some steps and exits; a round runs each once. Two processes of one thread each. Columns: samples/s after the
warm-up, also as a ratio to the tuned loop of the same round; seconds from the command to the end of the first step;
the peak memory of rank 0 up to the last step, and the largest of any process to the end (Lockstep also evaluates and
saves a checkpoint there); the energy of the processors per 1,000 samples, start and end included, where the system
tells it. Medians and quartiles over the rounds. "small m": with a micro-batch that is smaller than what the others
have. With --at-least the exit code is 1 where Lockstep is slower than this ratio to the tuned loop. Run nothing else
beside it.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from measured_at import add_precision, measured_at
from works import WORKS, Work, text_model, tokenizer

from lockstep.base.lifetime import end_family

PEERS = Path(__file__).parent / "peers"

WORLD = 2
SCRIPTS = {
    "textbook DDP loop": "textbook.py",
    "tuned loop": "tuned.py",
    "Accelerate": "accelerated.py",
    "HF Trainer": "trainer.py",
    "Lightning": "lightning_loop.py",
}
REFERENCE = "tuned loop"
SMALL = "Lockstep exact, small m"
KINDS = {"Lockstep exact": "exact", "Lockstep fast": "fast", SMALL: "exact"}
CONTENDERS = [*SCRIPTS, *KINDS]
TEXT_ONLY = {"HF Trainer"}
ENERGY = Path("/sys/class/powercap")
"""Where Linux has the energy meters of processors (RAPL); readable by root only on most systems."""
TEST_ROWS = 64
LIMIT = 600.0
"""Seconds after which a contender hangs."""
POLL = 0.25
GRACE = 5.0
"""Seconds to end by itself once it is asked to."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """What the contenders of a work share."""

    work: Work
    folder: Path
    """Temporary: the data, the runs and the meters' files."""
    model: Path
    """MiniLM."""
    peers: Path
    """The bin folder of the peers' environment."""
    precision: str = "bf16"


def takes_part(name: str, work: Work) -> bool:
    """Whether a contender has this work."""
    return (work.is_text or name not in TEXT_ONLY) and (work.small_micro_batch is not None or name != SMALL)


def lockstep(name: str, setting: Setting) -> list[str]:
    """The command of a training with Lockstep."""
    work, folder = setting.work, setting.folder
    micro_batch = work.small_micro_batch if name == SMALL else work.global_batch // WORLD
    files = PEERS / "lockstep_files.py"
    settings = [
        f"run.dir={folder / 'runs'}",
        f"run.reproducibility={KINDS[name]}",
        f"launch.processes={WORLD}",
        "parallel.kind=ddp",
        f"train.steps={work.steps}",
        f"train.global_batch={work.global_batch}",
        f"train.micro_batch={micro_batch}",
        f"train.precision={setting.precision}",
        f"optim.lr={work.learning_rate}",
        f"observe.file={files}",
        f"observe.options.steps={work.steps}",
        "evaluate.every_epochs=null",
    ]
    if work.is_text:
        name = setting.model if work.model == "minilm" else folder / work.model
        settings += ["data.kind=ag_news", f"data.root={folder}", "model.kind=transformer", f"model.name={name}"]
    elif work.model == "cnn":
        settings += ["data.kind=mnist", f"data.root={folder}", f"data.limit={work.samples}", "model.kind=cnn"]
    else:
        settings += [f"{section}.{key}" for section in ("data", "model") for key in ("kind=user", f"file={files}")]
        settings += [f"data.options.samples={work.samples}"]
        settings += [f"{section}.options.size={work.model}" for section in ("data", "model")]
    empty = folder / "empty.yaml"
    empty.write_text("run: {name: null}\n", encoding="utf-8")
    return [sys.executable, "-m", "lockstep", "train", str(empty), *settings]


def command(name: str, setting: Setting) -> list[str]:
    """What starts a contender."""
    if name in KINDS:
        return lockstep(name, setting)
    options = {"--work": setting.work.name, "--precision": setting.precision, "--data": setting.folder}
    options |= {"--model": setting.model, "--out": setting.folder / "meter"}
    arguments = [str(part) for pair in options.items() for part in pair]
    return [str(setting.peers / "torchrun"), f"--nproc-per-node={WORLD}", str(PEERS / SCRIPTS[name]), *arguments]


def run(name: str, setting: Setting) -> Figures:
    """One run of a contender. Raises RuntimeError with its output if it fails."""
    folder = setting.folder
    meter = folder / "meter"
    meter.mkdir(exist_ok=True)
    for file in meter.glob("*.json"):
        file.unlink()
    before = energy_meters()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "METER": str(meter), "BEGAN": str(time.time())}
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(command(name, setting), cwd=folder, env=environment, stdout=output, stderr=output)
        peak = peak_of(process)
        output.seek(0)
        if process.returncode != 0 or not (meter / "rank-0.json").exists():
            raise RuntimeError(f"{name} on {setting.work.name} failed:\n{output.read()[-3000:]}")
    seen = json.loads((meter / "rank-0.json").read_text(encoding="utf-8"))
    rate = setting.work.global_batch / seen["seconds_per_step"]
    peaks = {"peak": seen["peak_bytes"] / 2**20, "whole": max(peak, seen["peak_bytes"]) / 2**20}
    return {"rate": rate, "first": seen["first_step"], **peaks, "joules": joules_since(before)}


def energy_meters(folder: Path = ENERGY) -> dict[Path, int]:
    """The meter of each processor in microjoules; none where the system has or shows none."""
    meters = {}
    for meter in folder.glob("intel-rapl:[0-9]/energy_uj"):  # those of a processor's parts have two numbers
        with suppress(OSError, ValueError):
            meters[meter] = int(meter.read_text(encoding="ascii"))
    return meters


def joules_since(before: dict[Path, int], folder: Path = ENERGY) -> float:
    """What all processors have used since `before`; not a number where it cannot be known."""
    now, used = energy_meters(folder), 0
    for meter, value in before.items():
        wraps_at = int((meter.parent / "max_energy_range_uj").read_text(encoding="ascii")) + 1
        used += (now[meter] - value) % wraps_at
    return used / 1e6 if before else math.nan


def peak_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a command; the largest peak of one of its processes in bytes."""
    deadline, peak = time.monotonic() + LIMIT, 0
    while process.poll() is None and time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                lines = Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8").splitlines()
            except OSError:
                continue  # it has ended
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))])
        time.sleep(POLL)
    end_family(process, grace_seconds=GRACE)
    return peak


def prepare(setting: Setting, data: Path) -> None:
    """The data of a work: as many documents as are trained on, and a small test split."""
    work, folder, model = setting.work, setting.folder, setting.model
    for name in ("mnist", "ag_news"):
        (folder / name).mkdir()
    for file in (data / "mnist").iterdir():
        (folder / "mnist" / file.name).symlink_to(file)
    (folder / "ag_news" / "classes.txt").symlink_to(data / "ag_news" / "classes.txt")
    for split, rows in (("train", work.samples), ("test", TEST_ROWS)):
        with (data / "ag_news" / f"{split}.csv").open(encoding="utf-8") as file:
            text = "".join(itertools.islice(file, rows))
        (folder / "ag_news" / f"{split}.csv").write_text(text, encoding="utf-8")
    if work.is_text and work.model != "minilm":
        torch.manual_seed(0)
        text_model(work.model, model).save_pretrained(folder / work.model)  # type: ignore[operator]
        tokenizer(model).save_pretrained(folder / work.model)


def middle(values: Sequence[float], digits: int) -> str:
    """Median and quartiles."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(work: Work, seen: dict[str, list[Figures]]) -> list[str]:
    """The lines of a work."""
    has_energy = not any(math.isnan(figures["joules"]) for rounds in seen.values() for figures in rounds)
    lines = [
        f"### {work.name}: {work.model}, G = {work.global_batch}, {work.steps} steps",
        "",
        "| contender | samples/s | ratio to the tuned loop | first step, s | peak memory in steps, MiB | to the end |"
        + has_energy * " joules for 1,000 samples |",
        "|---|---|---|---|---|---|" + has_energy * "---|",
    ]
    for name, rounds in seen.items():
        columns = [middle([figures["rate"] for figures in rounds], 1), middle(ratios(seen, name), 2)]
        medians = {key: statistics.median(figures[key] for figures in rounds) for key in ("first", "peak", "whole")}
        columns += [f"{medians['first']:.1f}", f"{medians['peak']:.0f}", f"{medians['whole']:.0f}"]
        if has_energy:
            columns.append(f"{1000 * statistics.median(each['joules'] for each in rounds) / work.samples:.0f}")
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return [*lines, ""]


def measured(work: Work, names: Sequence[str], given: argparse.Namespace) -> dict[str, list[Figures]]:
    """All rounds of a work: contender -> its runs."""
    own = [name for name in names if takes_part(name, work)]
    seen: dict[str, list[Figures]] = {name: [] for name in own}
    with tempfile.TemporaryDirectory() as temporary:
        setting = Setting(work, Path(temporary), given.model.resolve(), given.peers.absolute(), given.precision)
        prepare(setting, given.data.resolve())
        for number in range(given.rounds):
            for name in own if number % 2 else reversed(own):
                seen[name].append(run(name, setting))
                sys.stderr.write(f"{work.name}, round {number + 1}: {name} {seen[name][-1]}\n")
    return seen


def ratios(seen: dict[str, list[Figures]], name: str) -> list[float]:
    """A contender's samples/s as ratios to the tuned loop's in the same round."""
    return [own["rate"] / other["rate"] for own, other in zip(seen[name], seen[REFERENCE], strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--peers", type=Path, default=PEERS / ".venv" / "bin", help="their environment's bin folder")
    parser.add_argument("--rounds", type=int, default=5)
    add_precision(parser)
    parser.add_argument("--at-least", type=float, help="the ratio to the tuned loop that Lockstep must reach")
    parser.add_argument("--out", type=Path, help="a file for the tables, such as benchmarks/results/compare.md")
    given = parser.parse_args()
    lines = [
        f"Figures {measured_at()}, {WORLD} processes of one thread, {given.precision} (the textbook loop: fp32), "
        f"{given.rounds} rounds in turns: medians (quartiles).",
        "",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    slow = []
    for work in (WORKS[name] for name in given.works):
        seen = measured(work, list(dict.fromkeys([REFERENCE, *given.contenders])), given)
        for name in KINDS.keys() & seen.keys():
            if given.at_least is not None and (ratio := statistics.median(ratios(seen, name))) < given.at_least:
                slow.append(f"{work.name}: {name} reaches {ratio:.2f} of the tuned loop, not {given.at_least:.2f}")
        lines += table(work, seen)
        sys.stdout.write("\n".join(table(work, seen)) + "\n")
        sys.stdout.flush()
        if given.out:
            given.out.write_text("\n".join(lines), encoding="utf-8")
    sys.stderr.write("".join(f"{line}\n" for line in slow))
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
