"""For how long training stands still for a save: written beside the next steps, against waiting for the disk.

    python benchmarks/checkpoint_stall.py [--models encoder mlp200] [--worlds 1 2] [--folder FOLDER] [--pairs 6]

In turns, in the same processes: a save that is waited for, and one that is written while steps go on. The stall of the
second is the time in `Saving.start`; while it is written, the steps are timed, and so are as many with nothing beside.
Run nothing else beside it; the folder lies on the disk that is measured.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from measured_at import add_precision, measured_at
from networks import loopback, measured
from reproducibility import MODELS, SHARDS, WideMLP, placed

from lockstep.base.events import Bus
from lockstep.base.model_contracts import Batch, MicroBatch, Model
from lockstep.base.world import World
from lockstep.checkpoint.layout import Manifest
from lockstep.checkpoint.writer import Writer
from lockstep.core.distributed import process_group
from lockstep.core.numerics.precision import fix_numerics
from lockstep.training.saving import Saving
from lockstep.training.state import TrainState
from lockstep.training.step import step


def mlp200(precision: str) -> tuple[dict, Model, list[Batch]]:
    """200 million parameters, AdamW: 2.4 GB of weights and moments."""
    batches = [{"x": torch.randn(1, 10_000), "label": torch.randint(0, 10, (1,))} for _ in range(SHARDS)]
    return {"train": {"precision": precision}}, WideMLP(10_000), batches


MODELS["mlp200"] = mlp200
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(10**9)}
"""The C library gives no memory back between steps: taking 800 MB of gradients from the system each time would be most
of a step."""


def seconds(task: Callable[[], object]) -> float:
    """From all ranks' start to all ranks' end."""
    dist.barrier()
    begin = time.perf_counter()
    task()
    dist.barrier()
    return time.perf_counter() - begin


def agreed(flag: bool) -> bool:  # noqa: FBT001
    """Whether all ranks say so: each must take as many steps as the others."""
    word = torch.tensor(int(flag))
    dist.all_reduce(word, op=dist.ReduceOp.MIN)
    return bool(word)


class Rank:
    """One rank: its model, and what is measured."""

    def __init__(self, name: str, folder: Path, precision: str) -> None:
        self.state: TrainState
        self.micro_batches: list[MicroBatch]
        self.state, (self.micro_batches) = placed(name, "exact", precision)
        self.writer = Writer(folder, shutil.rmtree)
        self.saving = Saving(writer=self.writer, state=self.state, manifest=self.manifest, bus=Bus())
        self.tensors: dict[str, Tensor] = self.state.tensors()
        self.writer.warm_up(self.tensors)

    def manifest(self, metrics: dict[str, float]) -> Manifest:
        """As a run's."""
        return Manifest(
            step=self.state.step,
            epoch=1,
            world_size=1,
            saved_at=time.time(),
            numeric={},
            progress=self.state.state_dict(),
            metrics=metrics,
        )

    def step(self) -> float:
        """One step; how long it took."""
        return seconds(lambda: step(self.state, self.micro_batches, clip=1.0))

    def waited_for(self) -> float:
        """A save that training waits for."""

        def save() -> None:
            self.saving.start({})
            self.saving.finish()

        return seconds(save)

    def beside(self) -> tuple[float, float, list[float]]:
        """A save beside the steps: stall, seconds until it is written, and those of each step meanwhile."""
        stall = seconds(lambda: self.saving.start({}))
        save, steps = self.writer.pending, []
        assert save is not None
        while not agreed(not self.writer.is_busy):
            steps.append(self.step())
        self.saving.finish()
        return stall, save.result().seconds, steps


def work(name: str, pairs: int, folder: Path, *, precision: str) -> None:
    """One rank's part."""
    fix_numerics(threads=1, exact=True)
    world = World.from_environment()
    with process_group.opened(world, torch.device("cpu")):
        rank = Rank(name, folder, precision)
        for _ in range(3):
            rank.step()
        rank.waited_for()  # the first has its memory for the first time
        found: dict[str, list[float]] = {"waited": [], "stall": [], "written": [], "during": [], "quiet": []}
        for _ in range(pairs):
            found["waited"].append(rank.waited_for())
            found["quiet"] += [rank.step() for _ in range(3)]
            stall, written, steps = rank.beside()
            found["stall"].append(stall)
            found["written"].append(written)
            found["during"] += steps
        found["bytes"] = [sum(tensor.nbytes for tensor in rank.tensors.values())]
        if world.is_main:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


def row(name: str, world: int, found: dict[str, list[float]]) -> str:
    """A line of the table."""
    middle = {key: statistics.median(values) for key, values in found.items() if values}
    share = [100 * stall / waited for stall, waited in zip(found["stall"], found["waited"], strict=True)]
    low, _, high = statistics.quantiles(share, n=4)
    slower = f"{middle['during'] / middle['quiet']:.2f}" if found["during"] else "-"
    return (
        f"| {name} | {world} | {middle['bytes'] / 1e6:.0f} | {middle['waited']:.2f} | {1000 * middle['stall']:.0f} "
        f"| **{statistics.median(share):.1f} %** | {low:.1f} to {high:.1f} | {middle['written']:.2f} | {slower} "
        f"| {len(share)} |"
    )


def main() -> None:
    """Measure what was asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["encoder", "mlp200"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the one for temporary files")
    parser.add_argument("--pairs", type=int, default=6)
    add_precision(parser)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a file for the table, such as benchmarks/results/checkpoint_stall.md")
    options = parser.parse_args()
    if options.work:
        work(options.work, int(float(os.environ["PAIRS"])), Path(os.environ["FOLDER"]), precision=options.precision)
        return
    lines = [
        f"Figures {measured_at()}, {options.precision}.",
        "Medians. Share: stall of a save beside the steps / time of one that is waited for, of neighbouring saves.",
        "Beside: until a save beside the steps is written. Steps meanwhile: their time / that of steps without a save.",
        "",
        "| model | ranks | MB | waited for, s | stall, ms | share | quartiles | beside, s | steps meanwhile | pairs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    for name in options.models:
        for world in options.worlds:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                os.environ.update({"PAIRS": str(options.pairs), "FOLDER": folder, **KEPT})
                found = measured(__file__, name, loopback(world), seconds=400.0, precision=options.precision)
            lines.append(row(name, world, found))
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
