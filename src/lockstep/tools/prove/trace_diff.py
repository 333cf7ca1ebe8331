"""The first difference between two traces, and what it means.

A trace is what module_trace.py writes: per step the weights, per shard a micro-batch, its calls and gradients, per step
the sums over all shards.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.core.modules.module_trace import Line


@dataclass
class StepTrace:
    """The lines of one step from all ranks."""

    weights: dict[str, str] = field(default_factory=dict)
    sum: dict[str, str] = field(default_factory=dict)
    shards: dict[int, list[Line]] = field(default_factory=dict)


@dataclass
class RunTrace:
    """The lines of a run from all ranks, by step and shard."""

    modules: dict[str, str] = field(default_factory=dict)
    """Name of a module -> name with class, file and line."""
    steps: dict[int, StepTrace] = field(default_factory=dict)

    def add(self, lines: Iterable[Line]) -> "RunTrace":
        """Add the lines of one rank."""
        for line in lines:
            if line["kind"] == "modules":
                self.modules = line["modules"]
                continue
            step = self.steps.setdefault(line["step"], StepTrace())
            if line["kind"] in ("weights", "sum"):
                setattr(step, line["kind"], line["tensors"])
            else:
                step.shards.setdefault(line["shard"], []).append(line)
        return self


@dataclass(frozen=True, kw_only=True)
class TraceDifference:
    kind: str
    """weights, batch, call, flow, gradient or sum."""
    step: int
    """Number of the step, from 0."""
    name: str
    """Name of the module, parameter or column."""
    shard: int | None = None


def read(folder: Path) -> RunTrace:
    """Read the trace of a run from the files of all its ranks."""
    trace = RunTrace()
    for path in sorted(folder.glob("trace-*.jsonl")):
        with path.open(encoding="utf-8") as file:
            trace.add(json.loads(line) for line in file)
    return trace


def first_difference(one: RunTrace, other: RunTrace) -> TraceDifference | None:
    """Find the first step, shard and module, in the order of the run, at which two traces differ."""
    for number in sorted(one.steps.keys() | other.steps.keys()):
        a, b = one.steps.get(number, StepTrace()), other.steps.get(number, StepTrace())
        if name := _first_unequal(a.weights, b.weights):
            return TraceDifference(kind="weights", step=number, name=name)
        for shard in sorted(a.shards.keys() | b.shards.keys()):
            if difference := _shard_difference(a.shards.get(shard, []), b.shards.get(shard, [])):
                kind, name = difference
                return TraceDifference(kind=kind, step=number, name=name, shard=shard)
        if name := _first_unequal(a.sum, b.sum):
            return TraceDifference(kind="sum", step=number, name=name)
    return None


def _first_unequal(a: dict[str, str], b: dict[str, str]) -> str | None:
    return next((name for name in [*a, *b] if a.get(name) != b.get(name)), None)


def _shard_difference(a: list[Line], b: list[Line]) -> tuple[str, str] | None:
    batches = [[line for line in lines if line["kind"] == "batch"] for lines in (a, b)]
    if batches[0] != batches[1]:
        columns = [line["columns"] for lines in batches for line in lines[:1]]
        return "batch", (_first_unequal(*columns) if len(columns) == 2 else None) or "the samples"
    if difference := _call_difference(*([line for line in lines if line["kind"] == "call"] for lines in (a, b))):
        return difference
    gradients = [{line["name"]: line["hash"] for line in lines if line["kind"] == "gradient"} for lines in (a, b)]
    name = _first_unequal(*gradients)
    return ("gradient", name) if name else None


def _call_difference(a: list[Line], b: list[Line]) -> tuple[str, str] | None:
    """Find the first call with equal inputs and other outputs: a module whose inputs differ only passes a difference
    on. Calls come in the order in which they end, so an inner module comes before the one around it."""
    for one, other in zip(a, b, strict=False):
        if one["name"] != other["name"]:
            return "flow", one["name"]
        if one["hash"] != other["hash"] and one["inputs"] == other["inputs"]:
            return "call", one["name"]
    if len(a) != len(b):
        return "flow", max(a, b, key=len)[min(len(a), len(b))]["name"]
    passed_on = next((one["name"] for one, other in zip(a, b, strict=True) if one["hash"] != other["hash"]), None)
    return ("call", passed_on) if passed_on else None


REPEATED = {
    "weights": "the initial weights, first of them {name}, are others each time the model is built: what builds it "
    "draws random numbers that Lockstep does not seed (such as numpy.random.default_rng())",
    "batch": "the data ({name}) is not the same when the same samples are fetched again: the source, or augment(), "
    "draws random numbers that Lockstep does not seed (such as numpy.random.default_rng()), or changes what it holds",
    "call": "module {module} gave other outputs for equal inputs, weights and seeds: it draws random numbers that "
    "Lockstep does not seed (numpy.random.default_rng(), a torch.Generator of its own), keeps something from one call "
    "to the next, or uses an operation that is not deterministic",
    "flow": "module {module} was called in one pass where another was called in the other: which modules run is not "
    "the same when a micro-batch is repeated",
    "gradient": "all modules gave equal outputs but the gradient of {name} differs: the loss, or a backward pass, is "
    "not deterministic",
}
"""Kind of difference between two passes over the same micro-batch -> what it means."""

SPREAD = {
    "weights": "the weights before {step} differ, first of them {name}, though all gradients until then are equal: "
    "the building of the model or the optimizer depends on the process",
    "batch": "{step}: the data ({name}) differs: the source, or augment(), depends on the process, or on what it was "
    "asked before",
    "call": "{step}: module {module} gave other outputs for equal inputs: it depends on the process (its rank, the "
    "number of processes, the environment, the clock), or keeps something from one micro-batch to the next",
    "flow": "{step}: module {module} was called with one number of processes where another was called with the other",
    "gradient": "{step}: all modules gave equal outputs but the gradient of {name} differs: the loss, or a backward "
    "pass of its own, depends on the process",
    "sum": "{step}: the gradients of all shards are equal but their sum over the processes differs, first of all in "
    "{name}: that is an error of Lockstep's, please report it with your config",
}
"""Kind of difference between two numbers of processes -> what it means."""

COMPARED = {
    "weights": "{step}: the weights before it differ, first of them {name}, though all until then is equal",
    "batch": "{step}: the data ({name}) differs",
    "call": "{step}: module {module} gave other outputs, while all before it are equal",
    "flow": "{step}: module {module} was called in one where another was called in the other",
    "gradient": "{step}: all modules gave equal outputs but the gradient of {name} differs",
    "sum": "{step}: the gradients of all shards are equal, but their sum differs, first of all in {name}",
}
"""Kind of difference between two runs that may be of different configs -> what it means."""


def explained(difference: TraceDifference, trace: RunTrace, meanings: dict[str, str]) -> str:
    """Describe a difference in a sentence, with the module's class, file and line."""
    name, module = difference.name, trace.modules.get(difference.name, difference.name)
    step = f"step {difference.step + 1}" + (f", shard {difference.shard}" if difference.shard is not None else "")
    return meanings[difference.kind].format(step=step, name=name, module=module)
