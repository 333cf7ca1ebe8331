"""What watching a run costs that every run pays: events, files, times of the ranks, heartbeats, comparison of weights.

    python benchmarks/observing.py --data FOLDER [--works cnn-64 cnn-512] [--rounds 5] [--out FILE]

FOLDER holds mnist/. Two processes of one thread each. In turns: the default, and as little as the config allows (no
sinks, two logged steps, no comparison of weights). Each counts the second half of its steps. Then a run in which rank
0 times those parts by the clock, and counts its switches between phases, each of which takes as long as measured apart.
Run nothing else beside it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measured_at import add_precision, measured_at

from lockstep.core.host import phases

WORKS = {"cnn-64": (64, 32, 500), "cnn-512": (512, 64, 60)}
"""Global batch, micro-batch, steps."""
MODES = ("default", "least")
TIMERS = """
import json
import time
from pathlib import Path
from lockstep.base.events import Bus, RunEnded, StepDone
from lockstep.core.host.phases import PhaseClock
from lockstep.training.loop import RankClock

found = {"events": 0.0, "figures of the ranks": 0.0, "switches": 0, "steps": 0}
depth = [0]


def timed(kind, name, part):
    real = getattr(kind, name)

    def call(self, *arguments, **named):
        begin, depth[0] = time.perf_counter(), depth[0] + 1
        try:
            return real(self, *arguments, **named)
        finally:
            depth[0] -= 1
            is_end = any(isinstance(each, RunEnded) for each in arguments)  # of the run, not of a step
            if not depth[0] and found["steps"] > 20 and not is_end:
                found[part] += time.perf_counter() - begin

    setattr(kind, name, call)


def counted(self, phase, real=PhaseClock.switch):
    found["switches"] += found["steps"] > 20
    return real(self, phase)


class Count:
    def notice(self, event):
        found["steps"] += isinstance(event, StepDone)

    def close(self):
        Path(__file__).with_name("timers.json").write_text(json.dumps(found))


def observers(options):
    timed(Bus, "publish", "events")
    for name in ("step_done", "read"):
        timed(RankClock, name, "figures of the ranks")
    PhaseClock.switch = counted
    return [Count()]
"""


def step_seconds(folder: Path, work: str, mode: str, *settings: str) -> float:
    """Train; the mean of the second half of the steps."""
    batch, micro_batch, steps = WORKS[work]
    name = f"{mode}-{time.monotonic_ns()}"
    words = [f"run.dir={folder}", f"run.name={name}", f"train.steps={steps}", "evaluate.limit=64", *settings]
    words += [f"train.global_batch={batch}", f"train.micro_batch={micro_batch}", "launch.processes=2"]
    if mode == "least":
        words += ["observe.sinks=[]", f"observe.log_every={steps // 2}", "observe.desync_every=null"]
    command = [sys.executable, "-m", "lockstep", "train", str(folder / "c.yaml"), *words]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=300)
    lines = [json.loads(line) for line in (folder / name / "history.jsonl").read_text().splitlines()]
    late = [line["seconds"] for line in lines if line["kind"] == "steps" and line["step"] > steps // 2]
    seconds = sum(late) / (steps - steps // 2)
    sys.stderr.write(f"{work}, {mode}: {1e3 * seconds:.3f} ms a step\n")
    return seconds


def switch_seconds() -> float:
    """A switch between phases, as `with phase(...)` makes two."""
    phases.start()
    begin = time.perf_counter()
    for _ in range(100_000):
        with phases.phase("forward"):
            pass
    seconds = time.perf_counter() - begin
    phases.stop()
    return seconds / 200_000


def row(work: str, folder: Path, rounds: int) -> str:
    """A line of the table."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            seconds[mode].append(step_seconds(folder, work, mode))
    ratios = sorted(one / other for one, other in zip(seconds["default"], seconds["least"], strict=True))
    (folder / "timers.py").write_text(TIMERS)
    step_seconds(folder, work, "default", f"observe.file={folder / 'timers.py'}")
    found = json.loads((folder / "timers.json").read_text())
    steps = found["steps"] - 20
    switches = found["switches"] / steps
    parts = [found["events"] / steps, found["figures of the ranks"] / steps, switches * switch_seconds()]
    middle = {mode: statistics.median(each) for mode, each in seconds.items()}
    shown = " | ".join(f"{1e6 * part:.0f} µs" for part in parts)
    return (
        f"| {work} | {1e3 * middle['default']:.2f} | {1e3 * middle['least']:.2f} | {statistics.median(ratios):.3f} | "
        f"{ratios[0]:.3f} to {ratios[-1]:.3f} | {rounds} | {shown} | {sum(parts) / middle['default']:.2%} |"
    )


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=5)
    add_precision(parser)
    parser.add_argument("--out", type=Path, help="a file for the table, such as benchmarks/results/observing.md")
    options = parser.parse_args()
    lines = [
        f"Figures {measured_at()}, {options.precision}.",
        "ms of a step, medians; ratio: default / least of the same round, median, and lowest to highest.",
        "Then µs of a step by the clock of rank 0: events (with waiting for the files), figures of the ranks (with",
        "waiting for the others), switches between phases; and their sum as a share of the step. Of "
        f"{' and '.join(f'{WORKS[work][2] - 20} steps ({work})' for work in options.works)}.",
        "",
        "| work | default | least | ratio | spread | rounds | events | figures of the ranks | phases | share |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as made:
        data = f"data: {{kind: mnist, root: {options.data.absolute()}}}"
        Path(made, "c.yaml").write_text(f"{data}\nmodel: {{kind: cnn}}\ntrain: {{precision: {options.precision}}}\n")
        lines += [row(work, Path(made), options.rounds) for work in options.works]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
