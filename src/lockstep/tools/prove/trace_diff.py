"""The first difference between two traces, and what it means.

A trace is what module_trace.py has written: per step the weights, per shard a micro-batch, its calls and gradients,
per step the sums over all shards.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.core.modules.module_trace import Line


@dataclass
class Step:
    """What one step left behind on all ranks."""

    weights: dict[str, str] = field(default_factory=dict)
    sum: dict[str, str] = field(default_factory=dict)
    shards: dict[int, list[Line]] = field(default_factory=dict)


@dataclass
class Traced:
    """A whole trace, in the order of steps and shards, whoever ran them."""

    modules: dict[str, str] = field(default_factory=dict)
    """Dotted name -> that with class, file and line."""
    steps: dict[int, Step] = field(default_factory=dict)

    def add(self, lines: Iterable[Line]) -> "Traced":
        """Take over the lines of one rank."""
        for line in lines:
            if line["kind"] == "modules":
                self.modules = line["modules"]
                continue
            step = self.steps.setdefault(line["step"], Step())
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
    """From 0."""
    name: str
    """Of the module, the parameter or the columns."""
    shard: int | None = None

    @property
    def place(self) -> str:
        """For people, who count steps from 1."""
        return f"step {self.step + 1}" + (f", shard {self.shard}" if self.shard is not None else "")


def read(folder: Path) -> Traced:
    """The trace of a run, from the files of all its ranks."""
    traced = Traced()
    for path in sorted(folder.glob("trace-*.jsonl")):
        with path.open(encoding="utf-8") as file:
            traced.add(json.loads(line) for line in file)
    return traced


def first_difference(one: Traced, other: Traced) -> TraceDifference | None:
    """The first step, shard and module, in the order of the run, at which two traces part."""
    for number in sorted(one.steps.keys() | other.steps.keys()):
        a, b = one.steps.get(number, Step()), other.steps.get(number, Step())
        if name := _unequal(a.weights, b.weights):
            return TraceDifference(kind="weights", step=number, name=name)
        for shard in sorted(a.shards.keys() | b.shards.keys()):
            if found := _in_shard(a.shards.get(shard, []), b.shards.get(shard, [])):
                return TraceDifference(kind=found[0], step=number, name=found[1], shard=shard)
        if name := _unequal(a.sum, b.sum):
            return TraceDifference(kind="sum", step=number, name=name)
    return None


def _unequal(a: dict[str, str], b: dict[str, str]) -> str | None:
    return next((name for name in [*a, *b] if a.get(name) != b.get(name)), None)


def _in_shard(a: list[Line], b: list[Line]) -> tuple[str, str] | None:
    batches = [[line for line in lines if line["kind"] == "batch"] for lines in (a, b)]
    if batches[0] != batches[1]:
        columns = [line["columns"] for lines in batches for line in lines[:1]]
        return "batch", (_unequal(*columns) if len(columns) == 2 else None) or "the samples"
    if found := _in_calls(*([line for line in lines if line["kind"] == "call"] for lines in (a, b))):
        return found
    gradients = [{line["name"]: line["hash"] for line in lines if line["kind"] == "gradient"} for lines in (a, b)]
    name = _unequal(*gradients)
    return ("gradient", name) if name else None


def _in_calls(a: list[Line], b: list[Line]) -> tuple[str, str] | None:
    """The first call with equal inputs and other outputs: a module whose inputs differ has been handed the difference.
    Calls come in the order in which they end, so an inner module comes before the one around it."""
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
    "weights": "the weights before {place} differ, first of them {name}, though all gradients until then are equal: "
    "the building of the model or the optimizer depends on the process",
    "batch": "{place}: the data ({name}) differs: the source, or augment(), depends on the process, or on what it was "
    "asked before",
    "call": "{place}: module {module} gave other outputs for equal inputs: it depends on the process (its rank, the "
    "number of processes, the environment, the clock), or keeps something from one micro-batch to the next",
    "flow": "{place}: module {module} was called on one world where another was called on the other",
    "gradient": "{place}: all modules gave equal outputs but the gradient of {name} differs: the loss, or a backward "
    "pass of its own, depends on the process",
    "sum": "{place}: the gradients of all shards are equal but their sum over the processes differs, first of all in "
    "{name}: that is an error of Lockstep's, please report it with your config",
}
"""Kind of difference between two worlds -> what it means."""


def explained(found: TraceDifference, traced: Traced, meanings: dict[str, str]) -> str:
    """A difference in a sentence, with the module's class, file and line."""
    module = traced.modules.get(found.name, found.name)
    return meanings[found.kind].format(place=found.place, name=found.name, module=module)
