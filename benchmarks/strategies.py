"""What each way to spread a model costs in time and saves in memory: samples/s and peak memory per process, one table.

    python benchmarks/strategies.py [--rounds 3] [--seconds 10]

The MiniLM encoder (22.7 million parameters, bf16 autocast, AdamW), steps of four micro-batches of 16 documents of 64
tokens: one process alone, then two with each strategy. Every strategy gets processes of its own in every round, in
turns, so that memory is its own and a slow minute hits all; times are medians over the rounds, ratios are to `ddp` of
the same round. Memory is the peak of the resident set of the process that takes most, with what a process without any
model takes told beside it. Run nothing else beside it.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measured_at import add_precision, measured_at
from torch import nn

from lockstep.base.model_contracts import MicroBatch
from lockstep.base.world import World
from lockstep.core.distributed import process_group
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.numerics.precision import fix_numerics
from lockstep.recipe import build
from lockstep.recipe import recipe as recipes
from lockstep.training.step import step

sys.path.insert(0, str(Path(__file__).parent))
from networks import loopback, measured
from reproducibility import SHARDS, encoder

SAMPLES = 16 * SHARDS
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"kind": "single"}),
    "torch.nn.DataParallel": (1, {"kind": "single"}),
    "ddp": (2, {"kind": "ddp"}),
    "fsdp": (2, {"kind": "fsdp"}),
    "fsdp, reshard: false": (2, {"kind": "fsdp", "reshard": False}),
    "pipeline, 1f1b": (2, {"kind": "pipeline"}),
    "pipeline, gpipe": (2, {"kind": "pipeline", "schedule": "gpipe"}),
}
"""Name -> processes, settings of `parallel`."""


def resident(kind: str) -> int:
    """This process's VmHWM (peak) or VmRSS (now), in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


def work(name: str, seconds: float, precision: str) -> None:
    """One process: warm up, then steps for so long."""
    fix_numerics(threads=1, exact=True)
    torch.manual_seed(0)
    world = World.from_environment()
    with process_group.opened(world, torch.device("cpu")):
        empty = resident("VmRSS")
        sections, model, batches = encoder(precision)
        if name == "torch.nn.DataParallel":  # as the model is called; blocks() and loss() stay its own
            model.network = nn.DataParallel(model.network)
        recipe = recipes.Recipe.model_validate({**sections, "parallel": ROWS[name][1]})
        state = build.distribute(recipe, model, lambda: batches[0], total_steps=10_000, device=torch.device("cpu"))
        every, times = frozenset(range(SHARDS)), []
        micro_batches = [
            MicroBatch(
                step=0,
                shard=shard or 0,
                ghost=shard is None,
                indices=(0,),
                batch=batches[shard or 0],
                shards=SHARDS,
                present=every,
            )
            for shard in state.strategy.owned(SHARDS, every)
        ]
        start = time.perf_counter()
        while True:
            dist.barrier()
            before = time.perf_counter()
            step(state, micro_batches, clip=1.0)
            dist.barrier()
            times.append(time.perf_counter() - before)
            if any(all_gather_object(len(times) > 4 and time.perf_counter() - start > seconds)):
                break
        peaks = all_gather_object((resident("VmHWM"), empty))
    if world.is_main:
        facts = {"seconds": statistics.median(times[2:]), "peak": max(peaks)[0], "empty": max(peaks)[1]}
        sys.stdout.write(json.dumps(facts) + "\n")


def row(name: str, rounds: list[dict[str, dict[str, float]]]) -> str:
    """A line of the table."""
    speed = statistics.median(SAMPLES / each[name]["seconds"] for each in rounds)
    ratios = sorted(each["ddp"]["seconds"] / each[name]["seconds"] for each in rounds)
    peak = statistics.median(each[name]["peak"] for each in rounds) / 2**20
    own = statistics.median(each[name]["peak"] - each[name]["empty"] for each in rounds) / 2**20
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    middle = statistics.median(ratios)
    return f"| {name} | {ROWS[name][0]} | {speed:.1f} | **{middle:.2f}** | {spread} | {peak:.0f} | {own:.0f} |"


def main() -> None:
    """Measure every row in turns and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of steps, per row and round")
    add_precision(parser)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a file for the table, such as benchmarks/results/strategies.md")
    options = parser.parse_args()
    if options.work:
        work(options.work, options.seconds, options.precision)
        return
    rounds = []
    for number in range(options.rounds):
        names = list(ROWS) if number % 2 == 0 else list(reversed(ROWS))
        rounds.append(
            {
                name: measured(
                    __file__, name, loopback(ROWS[name][0]), seconds=options.seconds, precision=options.precision
                )
                for name in names
            }
        )
    lines = [
        f"`python benchmarks/strategies.py --rounds {options.rounds} --seconds {options.seconds:g}`, {measured_at()}.",
        f"MiniLM, {options.precision}, AdamW, G = 64, m = 16, 64 tokens. Ratio: samples/s against ddp's, same round.",
        "MiB per process: the peak, and how much of it is more than a process takes without a model.",
        "",
        "| strategy | processes | samples/s | ratio | lowest to highest | peak MiB | of which its own |",
        "|---|---|---|---|---|---|---|",
        *(row(name, rounds) for name in ROWS),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
