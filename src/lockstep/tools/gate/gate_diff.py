"""The first difference between two golden files, whatever their modules and parameters are called."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lockstep.base.errors import few
from lockstep.core.modules.module_trace import Line
from lockstep.tools.gate.golden_file import Golden
from lockstep.tools.prove.trace_diff import RunTrace, StepTrace

PLACE = re.compile(r", [^,]*:\d+\)$")
"""File and line in the description of a module, unless its class is torch's."""


def difference(golden: Golden, now: Golden) -> str | None:
    """Describe the first step that differs, whether in data, forward, backward, the sum or the optimizer, and the
    module or parameter; None where all weights, sums and numbers are the same."""
    before, after = (RunTrace().add(line.model_dump() for line in each.lines) for each in (golden, now))
    counts = [len(each.chain) for each in (golden, now)]
    steps = zip(before.steps.values(), after.steps.values(), golden.numbers, now.numbers, strict=False)
    for step, (a, b, one, other) in enumerate(steps):
        diff = StepDiff(a, b, numbers=(one, other), modules=now.modules)
        if name := first_new(a.weights.values(), b.weights.items()):
            if not step:
                return f"differs before the first step, in building the model: {name} has other initial values"
            what = f"the optimizer: equal gradients give other weights, first of all {name}"
            if name not in after.steps[0].sum and not name.startswith("ema."):
                what = f"forward: {diff.located(name.rpartition('.')[0])} leaves other values in its buffer {name}"
            return f"differs from step {step} on, in {what}"
        if step < min(counts) and (found := diff.first()):
            return f"differs from step {step + 1} on, in {found}"
    return None if counts[0] == counts[1] else f"differs in data: the run had {counts[0]} steps, and has {counts[1]}"


def first_new(before: Iterable[str], now: Iterable[tuple[str, str]]) -> str | None:
    """Return the name of the first hash that `before` lacks or has fewer times; None where both have the same ones."""
    left = Counter(before)
    for name, hash_ in now:
        left[hash_] -= 1
        if left[hash_] < 0:
            return name
    return "one that is gone" if left.total() else None


def farthest(golden: Golden, now: Golden) -> tuple[float, str]:
    """Return the largest distance of two logged numbers, in units in the last place of float32, and what they are."""
    found = [(math.inf if len(golden.chain) != len(now.chain) else 0.0, "the number of steps")]
    for step, (one, other) in enumerate(zip(golden.numbers, now.numbers, strict=False), start=1):
        for name, b in other.items():
            a, distance = one.get(name), math.inf
            if a is not None and b is not None:
                distance = abs(a - b) / math.ldexp(1.0, max(math.frexp(max(abs(a), abs(b)))[1] - 24, -149))
            found.append((0.0 if a == b else distance, f"the {name.replace('_', ' ')} of step {step}"))
    return max(found, key=lambda each: each[0])


@dataclass(frozen=True)
class StepDiff:
    """A step that begins with equal weights, as it was and as it is."""

    a: StepTrace
    b: StepTrace
    numbers: tuple[Mapping[str, float | None], Mapping[str, float | None]]
    modules: Mapping[str, str]

    def first(self) -> str | None:
        """Describe the first difference; None where sums and numbers are the same, whatever gave them."""
        one, other = self.numbers
        names = [name for name in other if one.get(name) != other[name]]
        texts = {name: f"the {name.replace('_', ' ')} was {one.get(name)!r} and is {other[name]!r}" for name in names}
        total = first_new(self.a.sum.values(), self.b.sum.items())
        if not texts and not total:
            return None
        is_traced = any(line["kind"] == "call" for lines in self.b.shards.values() for line in lines)
        known = "all traced modules gave equal outputs" if is_traced else "modules are traced in two steps, not in this"
        found = (
            ("data", self._in_shards(self._data)),
            ("forward", self._in_shards(self._call)),
            ("forward", "loss" in texts and f"{known}, but {texts['loss']}"),
            ("backward", self._in_shards(self._gradient)),
            ("the sum" if is_traced else "backward", total and f"of the gradients of {total}, averaged and clipped"),
            ("the sum", texts.get("gradient_norm")),
            ("the optimizer", texts.get("learning_rate")),
        )
        return next(f"{place}: {what}" for place, what in found if what)

    def _in_shards(self, find: Callable[[list[Line], list[Line]], str | None]) -> str | None:
        a, b = self.a.shards, self.b.shards
        found = ((shard, find(a.get(shard, []), b.get(shard, []))) for shard in sorted(a.keys() | b.keys()))
        return next((f"{what} (shard {shard})" for shard, what in found if what), None)

    def _data(self, one: list[Line], other: list[Line]) -> str | None:
        had, has = ([*_of(lines, "batch"), {"samples": [], "columns": {}}][0] for lines in (one, other))
        if had["samples"] != has["samples"]:
            return f"the samples were {few(had['samples'])}, and are {few(has['samples'])}"
        name = first_new(had["columns"].values(), has["columns"].items())
        return name and f"the column {name} has other values"

    def _call(self, one: list[Line], other: list[Line]) -> str | None:
        """Find the first call with known inputs and unknown outputs. Calls come in the order in which they end, so an
        inner module comes before the one around it."""
        inputs, outputs = ({line[part] for line in _of(one, "call")} for part in ("inputs", "hash"))
        new = (line for line in _of(other, "call") if line["inputs"] in inputs and line["hash"] not in outputs)
        return next((f"{self.located(line['name'])} gives other outputs for equal inputs" for line in new), None)

    def _gradient(self, one: list[Line], other: list[Line]) -> str | None:
        """Find the first gradient that is another, and the user's modules passed backwards since the last equal one."""
        pairs = [(line["name"], line["hash"]) for line in _of(other, "gradient")]
        if (name := first_new([line["hash"] for line in _of(one, "gradient")], pairs)) is None:
            return None
        names, own = [each for each, _ in pairs], name.rpartition(".")[0]
        equal = {each.rpartition(".")[0] for each in names[: names.index(name) if name in names else 0]}
        calls = [line["name"] for line in _of(other, "call")]
        calls = calls[calls.index(own) if own in calls else 0 :]
        end = next((n for n, call in enumerate(calls) if call in equal), len(calls))
        passed = [self.modules[call] for call in calls[: end + 1] if PLACE.search(self.modules[call])]
        look = f": look at the backward pass of {few(passed)}" if passed else ""
        return f"the gradient of {name} is another{look}"

    def located(self, name: str) -> str:
        """Describe a module, one of torch's with the user's module around it."""
        outer = name
        while outer and not PLACE.search(self.modules.get(outer, "")):
            outer = outer.rpartition(".")[0]
        around = f" in {self.modules[outer]}" if outer not in ("", name) else ""
        return f"module {self.modules.get(name, name)}{around}"


def _of(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]
