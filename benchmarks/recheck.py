"""What observe.recheck costs: steps of the CNN with none, 2, 10 and 100 per cent of them run once more.

    python benchmarks/recheck.py [--works cnn-64 cnn-512] [--worlds 1 2] [--rounds 5] [--steps 400] [--out FILE]

The digits; processes of one thread each. The shares take turns within a round; the first 20 steps do not
count. Run nothing else beside it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measured_at import measured_at

from lockstep.core.numerics.seeds import seed_of

WORKS = {"cnn-64": (64, 16), "cnn-512": (512, 64)}
"""Global batch, micro-batch."""
SHARES = (None, 0.02, 0.1, 1.0)
WARM_UP = 20


def is_chosen(step: int, share: float | None) -> bool:
    """As lockstep.run.rechecking chooses, for the seed 0."""
    return share is not None and seed_of(0, "recheck", step) < share * 2**63


def step_seconds(folder: Path, case: tuple[str, int], share: float | None, *, steps: int) -> float:
    """Train a work on a number of processes; the mean of the steps after the first ones."""
    work, world = case
    batch, micro_batch = WORKS[work]
    name = f"run-{time.monotonic_ns()}"
    words = [f"run.dir={folder}", f"run.name={name}", f"train.steps={steps}", "evaluate.limit=64"]
    words += [f"train.global_batch={batch}", f"train.micro_batch={micro_batch}", f"launch.processes={world}"]
    words += [f"observe.recheck={'null' if share is None else share}", f"observe.log_every={WARM_UP}"]
    command = [sys.executable, "-m", "lockstep", "train", str(folder / "c.yaml"), *words]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=600)
    lines = [json.loads(line) for line in (folder / name / "history.jsonl").read_text().splitlines()]
    late = [line["seconds"] for line in lines if line["kind"] == "steps" and line["step"] > WARM_UP]
    seconds = sum(late) / (steps - WARM_UP)
    sys.stderr.write(f"{work}, {world} processes, {share}: {1e3 * seconds:.3f} ms a step\n")
    return seconds


def rows(folder: Path, case: tuple[str, int], options: argparse.Namespace) -> list[str]:
    """Lines of the table, one for each share, of a work on a number of processes."""
    seconds: dict[float | None, list[float]] = {share: [] for share in SHARES}
    for number in range(options.rounds):
        for share in SHARES if number % 2 == 0 else reversed(SHARES):
            seconds[share].append(step_seconds(folder, case, share, steps=options.steps))
    lines = []
    for share in SHARES:
        ratios = sorted(one / other for one, other in zip(seconds[share], seconds[None], strict=True))
        chosen = sum(is_chosen(step, share) for step in range(WARM_UP, options.steps)) / (options.steps - WARM_UP)
        lines.append(
            f"| {case[0]} | {case[1]} | {0 if share is None else share:.0%} | {chosen:.1%} | "
            f"{1e3 * statistics.median(seconds[share]):.2f} | {statistics.median(ratios):.3f} | "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
    return lines


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, help="a file for the table, such as benchmarks/results/recheck.md")
    options = parser.parse_args()
    lines = [
        f"Figures {measured_at()}.",
        f"ms of a step, medians of {options.rounds} rounds of {options.steps - WARM_UP} steps; ratio: to no recheck in",
        "the same round, median, and lowest to highest. Chosen: the share of these steps that was run again, which the",
        "seed decides.",
        "",
        "| work | processes | observe.recheck | chosen | ms | ratio | spread |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as made:
        Path(made, "c.yaml").write_text("data: {kind: digits}\nmodel: {kind: cnn}\ntrain: {epochs: null}\n")
        for work in options.works:
            for world in options.worlds:
                lines += rows(Path(made), (work, world), options)
    sys.stdout.write("\n".join(lines) + "\n")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
