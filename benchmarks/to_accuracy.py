"""Seconds from typing the command to a test accuracy on MNIST: Lockstep beside the tuned loop, in turns.

    python benchmarks/to_accuracy.py --data FOLDER [--target 0.99] [--rounds 5] --out FILE

FOLDER holds mnist/. Both train the same network with AdamW at a constant learning rate, G = 128, in bf16 on two
processes of one thread, and measure all 10,000 test images every 100 steps; each round has its own seed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare import GRACE, LIMIT, PEERS, WORLD, middle
from measured_at import add_precision, measured_at

from lockstep.base.lifetime import end_family

NAMES = ("tuned loop", "Lockstep exact")


def command(name: str, given: argparse.Namespace, folder: Path, *, seed: int) -> list[str]:
    """What starts a contender, which writes the time to folder/reached.json."""
    reached = folder / "reached.json"
    if name == NAMES[0]:
        arguments = ["--data", str(given.data.resolve()), "--out", str(reached), "--target", str(given.target)]
        arguments += ["--every", str(given.every), "--precision", given.precision]
        script = str(PEERS / "tuned_accuracy.py")
        return [str(given.peers / "torchrun"), f"--nproc-per-node={WORLD}", script, *arguments]
    (folder / "c.yaml").write_text("model: {kind: cnn}\n", encoding="utf-8")
    settings = [
        f"run.dir={folder / 'runs'}",
        f"run.seed={seed}",
        f"launch.processes={WORLD}",
        "parallel.kind=ddp",
        "data.kind=mnist",
        f"data.root={given.data.resolve()}",
        "train.epochs=10",
        "train.global_batch=128",
        "train.micro_batch=64",
        f"train.precision={given.precision}",
        "optim.lr=1e-3",
        "schedule.shape=constant",
        "schedule.warmup=0",
        f"evaluate.every_steps={given.every}",
        "evaluate.micro_batch=500",
        f"observe.file={PEERS / 'lockstep_files.py'}",
        f"observe.options.target={given.target}",
    ]
    return [sys.executable, "-m", "lockstep", "train", str(folder / "c.yaml"), *settings]


def run(name: str, given: argparse.Namespace, *, seed: int) -> dict[str, float]:
    """Seconds and steps. Raises RuntimeError where the target is not reached."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        reached, output = folder / "reached.json", folder / "output.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SEED": str(seed), "METER": str(folder)}
        environment["BEGAN"] = str(time.time())
        with output.open("w") as file:
            process = subprocess.Popen(
                command(name, given, folder, seed=seed), cwd=folder, env=environment, stdout=file, stderr=file
            )
            deadline = time.monotonic() + LIMIT
            while not reached.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            end_family(process, grace_seconds=GRACE)
        if not reached.exists():
            raise RuntimeError(f"{name} does not reach {given.target}:\n{output.read_text()[-3000:]}")
        found: dict[str, float] = json.loads(reached.read_text(encoding="utf-8"))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", type=float, default=0.99)
    parser.add_argument("--every", type=int, default=100, help="steps between two measurements")
    parser.add_argument("--rounds", type=int, default=5)
    add_precision(parser)
    parser.add_argument("--peers", type=Path, default=PEERS / ".venv" / "bin", help="their environment's bin folder")
    parser.add_argument("--out", type=Path, help="a file for the table")
    given = parser.parse_args()
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for seed in range(given.rounds):
        for name in NAMES if seed % 2 else reversed(NAMES):
            seen[name].append(run(name, given, seed=seed))
            sys.stderr.write(f"round {seed + 1}: {name} {seen[name][-1]}\n")
    lines = [
        f"Figures {measured_at()}, {WORLD} processes, {given.precision}, "
        f"{given.rounds} rounds in turns: medians (quartiles). Test accuracy {given.target} on MNIST.",
        "",
        "| contender | seconds from the command | steps |",
        "|---|---|---|",
    ]
    for name, runs in seen.items():
        seconds, steps = [each["seconds"] for each in runs], [each["step"] for each in runs]
        lines.append(f"| {name} | {middle(seconds, 1)} | {statistics.median(steps):.0f} |")
    sys.stdout.write("\n".join(lines) + "\n")
    if given.out:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
