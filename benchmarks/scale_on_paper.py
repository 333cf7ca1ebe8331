"""Scaling by calculation, beside what others have measured on 8 to 2,048 GPUs; and what the tree's order costs there.

    python benchmarks/scale_on_paper.py [--out FILE]

Every series is one model in FSDP (weights in shards, gathered for each micro-batch) with the same framework and GPUs.
The row with the fewest GPUs gives the share of the peak that its passes reach; all others are predicted from it:

    step = micro-batches * max(passes, exchange) + exchange of the first of L blocks
    exchange = bytes / bandwidth + collectives * hops * latency
    bytes of a micro-batch: the weights twice in bf16, the gradients once in fp32 (bf16 where a row says so)

A ring over several machines sends with all network cards of a machine together, so that each byte crosses each of them
once per machine; its hops are one per GPU. In the tree's order (run.reproducibility=exact), gradients could be
exchanged from every GPU to every GPU: each would send nearly all of its gradient through its own card, G times as much
for G GPUs on a machine, in messages of one hop. Lockstep works "by machine": it first adds in the tree within the
machine, and then exchanges a G-th between machines. The latency is that of one hop with NCCL; 6 microseconds fit
Fernandez et al.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from measured_at import commit

LATENCY, MESSAGE = 6e-6, 2e-6
"""Seconds of a hop of a ring; seconds that a further message of an all-to-all takes."""
CARDS = 0.85
"""Share of the network cards' bandwidth that collectives reach."""
ON_MACHINE = 8
SIZES = (8, 64, 512, 4096)
UNKNOWN_EFFICIENCY = 0.4
"""Share of the peak where only a ratio was published."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    peak: float
    """FLOP/s in bf16, dense."""
    inside: float
    """Bytes per second of a ring inside a machine."""
    card: float
    """Bytes per second between machines, for each GPU."""


A100 = Gpu(peak=312e12, inside=235e9, card=25e9)  # 1,600 Gb/s for each machine of eight
H100 = Gpu(peak=989e12, inside=360e9, card=50e9)  # 3,200 Gb/s


@dataclass(frozen=True)
class Row:
    gpus: int
    samples: int
    """Samples of a micro-batch on each GPU."""
    micro_batches: int
    """Micro-batches of a step on each GPU."""
    rate: float
    """Measured tokens per second of each GPU; of the first row 1, where only the ratio is known."""


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    gpu: Gpu
    parameters: float
    blocks: int
    width: int
    tokens: int
    """Tokens of a sample."""
    recomputes: bool
    rows: tuple[Row, ...]
    gradient_bytes: int = 4
    source: str

    def flops(self, samples: int) -> float:
        """Operations of a micro-batch: forward and backward pass, and another forward pass where it recomputes."""
        once = samples * self.tokens * (2 * self.parameters + 4 * self.blocks * self.width * self.tokens)
        return once * (4 if self.recomputes else 3)


TITAN = "torchtitan"
MPT = {"1b": (1.316e9, 24, 2048), "3b": (2.652e9, 32, 2560), "7b": (6.659e9, 32, 4096), "13b": (12.854e9, 40, 5120)}
MPT |= {"30b": (29.975e9, 48, 7168)}


def mpt(name: str, gpu: Gpu, *rows: Row, recomputes: bool = False) -> Series:
    parameters, blocks, width = MPT[name]
    kind, size = ("H100", 4) if gpu is H100 else ("A100", 2)
    return Series(
        name=f"MPT {name}, {kind}",
        gpu=gpu,
        parameters=parameters,
        blocks=blocks,
        width=width,
        tokens=2048,
        recomputes=recomputes,
        rows=rows,
        gradient_bytes=size,
        source="llm-foundry",
    )


def llama(name: str, *rows: Row, parameters: float, tokens: int, source: str) -> Series:
    return Series(
        name=name,
        gpu=H100,
        parameters=parameters,
        blocks=32,
        width=4096,
        tokens=tokens,
        recomputes=False,
        rows=rows,
        source=source,
    )


SERIES = (
    mpt("1b", H100, Row(8, 14, 1, 45455), Row(16, 20, 1, 46037), Row(32, 20, 1, 45130), Row(64, 20, 1, 44402)),
    mpt("3b", H100, Row(16, 10, 3, 24142), Row(32, 6, 3, 23021), Row(64, 6, 3, 22525)),
    mpt("13b", H100, Row(8, 2, 1, 4792), Row(16, 2, 1, 4767), Row(32, 2, 1, 4811), Row(64, 2, 1, 4800)),
    mpt("30b", H100, Row(8, 3, 21, 2002), Row(16, 10, 3, 2263), Row(32, 14, 3, 2308), recomputes=True),
    mpt("3b", A100, Row(64, 6, 1, 9736), Row(128, 6, 1, 9538)),
    mpt(
        "7b",
        A100,
        *(Row(8, 12, 4, 3679), Row(16, 16, 1, 3645), Row(32, 18, 1, 3725), Row(64, 18, 1, 3665), Row(128, 18, 1, 3623)),
        recomputes=True,
    ),
    mpt(
        "13b",
        A100,
        *(Row(16, 10, 1, 1993), Row(32, 14, 1, 1998), Row(64, 16, 1, 1976), Row(128, 16, 1, 1972)),
        recomputes=True,
    ),
    mpt("30b", A100, Row(32, 4, 1, 857), Row(128, 6, 1, 865), recomputes=True),
    llama("Llama 3.1 8B, H100", Row(8, 2, 1, 5762), Row(128, 2, 1, 5605), parameters=8.03e9, tokens=8192, source=TITAN),
    llama(
        "Llama 3.1 8B compiled, H100",
        *(Row(8, 2, 1, 6667), Row(128, 2, 1, 6514)),
        parameters=8.03e9,
        tokens=8192,
        source=TITAN,
    ),
    llama(
        "Llama 2 7B, H100, relative",
        *(Row(128, 2, 1, 1.0), Row(2048, 2, 1, 1 - 0.3722)),
        parameters=6.74e9,
        tokens=4096,
        source="Fernandez",
    ),
)
SOURCES = """llm-foundry: scripts/train/benchmarking/README.md of mosaicml/llm-foundry. torchtitan: benchmarks/
llama3_h100_202412_torchtitan.md of pytorch/torchtitan, tables 1 and 3. Fernandez: J. Fernandez et al., Hardware
Scaling Trends and Diminishing Returns in Large-Scale Distributed Training, 2024 (arXiv 2411.13055): each GPU does
37.22 % less."""
ORDERS = ("ring", "every GPU to every GPU", "by machine")


def exchange(series: Series, gpus: int, order: str) -> float:
    """Seconds in which the collectives of one micro-batch run."""
    gpu, share = series.gpu, (gpus - 1) / gpus
    machines = -(-gpus // ON_MACHINE)
    ring = gpu.inside if machines == 1 else min(gpu.inside, CARDS * gpu.card * ON_MACHINE)
    gathers = 2 * (2 * series.parameters * share / ring + series.blocks * (gpus - 1) * LATENCY)
    size = series.gradient_bytes * series.parameters
    if order == "ring":
        return gathers + size * share / ring + series.blocks * (gpus - 1) * LATENCY
    outside = size * (machines - 1) / machines / (CARDS * gpu.card)
    inside = size * share / gpu.inside
    if order == "by machine":
        messages = ON_MACHINE - 1 + machines - 1
        return gathers + inside + outside / ON_MACHINE + series.blocks * (LATENCY + messages * MESSAGE)
    return gathers + max(inside, outside) + series.blocks * (LATENCY + (gpus - 1) * MESSAGE)


def step_seconds(series: Series, row: Row, *, efficiency: float, order: str) -> float:
    """Seconds of a step, whose exchange runs beside the passes but for that of one block."""
    passes = series.flops(row.samples) / (series.gpu.peak * efficiency)
    beside = exchange(series, row.gpus, order)
    return row.micro_batches * max(passes, beside) + beside / series.blocks


def tokens_of(series: Series, row: Row) -> int:
    """Tokens of a step on each GPU."""
    return row.samples * row.micro_batches * series.tokens


def efficiency_of(series: Series) -> float:
    """The share of the peak for which the first row comes out as measured, by halving."""
    first = series.rows[0]
    if first.rate == 1.0:
        return UNKNOWN_EFFICIENCY
    seconds, low, high = tokens_of(series, first) / first.rate, 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        took = step_seconds(series, first, efficiency=middle, order="ring")
        low, high = (middle, high) if took > seconds else (low, middle)
    return (low + high) / 2


def rate_of(series: Series, row: Row, *, order: str = "ring") -> float:
    """Tokens per second of each GPU."""
    return tokens_of(series, row) / step_seconds(series, row, efficiency=efficiency_of(series), order=order)


def predictions() -> list[str]:
    """A row for each published figure but the first of its series."""
    lines = ["| model | GPUs | samples | measured | predicted | ratio | source |", "|---|---|---|---|---|---|---|"]
    for series in SERIES:
        base = rate_of(series, series.rows[0]) / series.rows[0].rate
        for row in series.rows[1:]:
            predicted, digits = rate_of(series, row) / base, 3 if row.rate < 2 else 0
            cells = [str(row.gpus), f"{row.samples} x {row.micro_batches}", f"{row.rate:,.{digits}f}"]
            cells += [f"{predicted:,.{digits}f}", f"{predicted / row.rate:.2f}", series.source]
            lines.append(f"| {series.name} | {' | '.join(cells)} |")
    return lines


def orders() -> list[str]:
    """Tokens per second in each order of the sum, as a share of the ring's on 8 GPUs."""
    heads = " | ".join(f"{size:,} GPUs" for size in SIZES)
    lines = [f"| model | order | {heads} |", "|---|---|" + "---|" * len(SIZES)]
    for series in (SERIES[0], SERIES[2], SERIES[8]):
        first = series.rows[0]
        alone = rate_of(series, replace(first, gpus=ON_MACHINE))
        for order in ORDERS:
            shares = (rate_of(series, replace(first, gpus=size), order=order) / alone for size in SIZES)
            lines.append(f"| {series.name} | {order} | {' | '.join(f'{share:.0%}' for share in shares)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    head = f"""`python benchmarks/scale_on_paper.py`, at commit {commit()}: calculated. Tokens per second of each GPU,
as others have measured them and as predicted from the first row of each series."""
    middle = "The same as a share of the ring's on 8 GPUs, for three orders of the sum of FSDP's gradients:"
    text = "\n".join([head, "", *predictions(), "", middle, "", *orders(), "", SOURCES, ""])
    sys.stdout.write(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
