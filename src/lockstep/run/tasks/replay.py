"""A run of `lockstep replay`, `bisect`, `verify` or `gate`: training from a checkpoint, or the start, to a step that is
opened, traced or saved; or the step of a bundle."""

import json
import pdb
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from lockstep.base import plugins, storage
from lockstep.base.errors import CheckpointError, ConfigError, Interrupted, ModelError
from lockstep.base.events import TextSample
from lockstep.base.model_contracts import MicroBatch, Model
from lockstep.checkpoint import layout
from lockstep.core.modules.module_trace import class_of
from lockstep.core.modules.outputs import moved
from lockstep.core.numerics.seeds import restore_forward
from lockstep.inference.export.formats._weights import check_parameter_count
from lockstep.models.objectives._choice import objective_of_classes
from lockstep.recipe import build as building
from lockstep.recipe.components import Components
from lockstep.run.tasks.prove import write_trace
from lockstep.run.tasks.train import TrainTask
from lockstep.tools import trials
from lockstep.tools.prove.trace_diff import COMPARED, RunTrace, explained, first_difference
from lockstep.tools.replay import replay_bundle
from lockstep.tools.replay.opened_step import Row, chosen, opened, run_alone, traced, weight_rows
from lockstep.tools.replay.replay_bundle import WEIGHTS
from lockstep.tools.replay.replaying import OPENED, SAME_HASHES, ReplayRequest
from lockstep.training.loop_state import Training
from lockstep.training.state import TrainState

NEEDS_GROUP = True
TRACED_SHARDS = 8
"""Number of the first shards of a step whose calls and gradients a golden file has, for its size."""
SET_BACK = "Set these back, or replay all the same with --allow-drift"


def write(folder: Path, step: Row) -> None:
    storage.write(folder / OPENED.format(step["step"]), to_json(step))


class Debugger(pdb.Pdb):
    """Python's debugger, which ends the replay where the user quits."""

    def set_quit(self) -> None:
        raise Interrupted("the debugger was left")


def debug(model: Model, state: TrainState, micro_batch: MicroBatch) -> None:
    """Run a shard, and stop in the forward pass: in that of the user's module, or of a library's, if there is one.
    Raises Interrupted."""
    foreign = (m for m in model.modules() if class_of(m).__module__.split(".")[0] not in ("lockstep", "torch"))
    module = next(foreign, model)
    own = vars(module).get("forward")
    vars(module)["forward"] = partial(Debugger().runcall, module.forward)
    try:
        run_alone(state, micro_batch)
    finally:
        sys.settrace(None)
        restore_forward(module, own)


class ReplayTask(TrainTask):
    """Trains in a folder of its own, from a checkpoint of another run; without evaluations, observers and a report."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request = self.asked(ReplayRequest)
        self.parent = self.parent if self.request.checkpoint == self.parent else None

    def run(self, resume: str, *, allow_drift: bool) -> None:
        request = self.request
        if request.bundle is not None:
            self.claim()
            self.open_bundle(request.bundle)
        else:
            super().run(str(request.checkpoint or "never"), allow_drift=request.allow_drift)

    def starting(self, training: Training) -> None:
        """End the training after the last requested step; open or trace steps on the way."""
        request, parts, plain = self.request, self.parts, training.steps
        training.evaluate, training.deadline.end = None, None
        training.total_steps = request.until if request.saves else sys.maxsize  # the last step of a run is saved

        def steps(start: int) -> Iterator[list[MicroBatch]]:
            for micro_batches in islice(plain(start), request.until - start):
                if request.opens and request.first <= micro_batches[0].step + 1 <= request.last:
                    yield from self.opening(parts, micro_batches)
                else:
                    yield micro_batches

        training.steps = steps
        if request.traced_from is not None:
            file = self.recipe.folder / f"trace-{self.world.rank}.jsonl"
            middle = min(request.until, parts.total_steps) // 2

            def is_golden(micro_batch: MicroBatch) -> bool:
                return micro_batch.step in (0, middle) and micro_batch.shard < TRACED_SHARDS

            since, selects = request.traced_from - 1, is_golden if request.is_golden else None
            write_trace(file, parts, training, is_main=self.world.is_main, since=since, selects=selects)

    def opening(self, parts: Components, micro_batches: list[MicroBatch]) -> Iterator[list[MicroBatch]]:
        """Open a step before it is run, and look at the weights after it."""
        request, folder = self.request, self.recipe.folder
        if request.debugs:
            for each in chosen(parts.state, micro_batches, request.shard)[:1]:
                debug(parts.model, parts.state, each)
        trials.announce(folder, f"opening step {micro_batches[0].step + 1} ...")
        found = opened(parts.model, parts.state, micro_batches, shard=request.shard, data=parts.data)
        write(folder, found)  # before the step itself, which may end the run
        if request.save is not None and found["step"] == request.first:
            numeric = {**self.numeric, **self.facts}
            replay_bundle.save(request.save, parts, micro_batches, shard=request.shard, numeric=numeric)
        trained = ((name, p) for name, p in parts.state.module.named_parameters() if p.requires_grad)
        before = {name: parameter.detach().clone() for name, parameter in trained}
        yield micro_batches
        write(folder, {**found, "weights": weight_rows(before, parts.state)})

    def load_checkpoint(self, resume: str, *, allow_drift: bool) -> Path | None:
        """Load it on another processor, or with another torch, too, which it tells; settings have to be the same."""
        known = self.request.numeric
        if self.request.verifies:
            self.check_same(known)
            return super().load_checkpoint(resume, allow_drift=True)  # of settings that a later resume has changed
        settings = {name: value for name, value in self.numeric.items() if "." in name or not known}
        facts = {name: value for name, value in known.items() if "." not in name}
        self.tell_of_machine(facts)
        self.numeric = {**settings, **facts}
        changed = [each for each in layout.differences(known, self.numeric) if None not in each[1:]]
        if known and resume == "never" and changed and not allow_drift:
            listing = "\n  ".join(layout.described(*each) for each in changed)
            raise CheckpointError(f"the run was made with another numeric recipe:\n  {listing}\n  {SET_BACK}")
        return super().load_checkpoint(resume, allow_drift=allow_drift)

    def check_same(self, known: Mapping[str, Any]) -> None:
        """Write down what differs from the recipe, data or machine of an interval's end. Raises ConfigError."""
        found = [each for each in layout.differences(known, self.numeric) if None not in each[1:]]
        trials.write_result(self.recipe.folder, self.world.rank, found)
        if found:
            raise ConfigError("; ".join(layout.described(*each) for each in found))

    def resume_observers(self, checkpoint: Path | None, *, repeats: bool) -> None:
        """Repeat what observers asked for in the run."""
        self.steering.start(self.parts.state.step, repeats=True)

    def owes_evaluation(self, checkpoint: Path) -> bool:
        return False

    def first_look(self, *, is_fresh: bool) -> tuple[TextSample, ...]:
        return ()

    def write_report(self) -> None:
        """Write none."""

    def tell_of_machine(self, known: Mapping[str, Any]) -> None:
        """Say where this machine is another one."""
        for name, value in known.items() if self.world.is_main else ():
            if "." not in name and (now := self.facts.get(name)) != value:
                what = f"another {name.removesuffix('_model').replace('_', ' ')}: {now} here, {value} there"
                trials.announce(self.recipe.folder, f"{what}; the numbers may differ in their last bits")

    def open_bundle(self, file: Path) -> None:
        """Run the shards of a bundle, and compare the hashes with those that it holds."""
        facts, device, weights = replay_bundle.facts_of(file), self.device, replay_bundle.tensors_of(file, WEIGHTS)
        self.tell_of_machine(facts.numeric)
        batches = [moved(replay_bundle.tensors_of(file, f"shard-{each.shard}"), device) for each in facts.shards]
        shards = [MicroBatch(batch=batch, **vars(each)) for batch, each in zip(batches, facts.shards, strict=True)]
        if self.recipe.model.code is None and not hasattr(self.recipe.model, "name"):  # which has a size of its own
            with torch.device("meta"):
                kind = plugins.implementation("models", self.recipe.model.kind)
                check_parameter_count(kind.build(self.recipe.model, facts.spec), [file])
        model = building.build_model(self.recipe, facts.spec).to(device)
        if (of_classes := weights.pop(replay_bundle.CLASS_WEIGHTS, None)) is not None:
            objective_of_classes(model, "train.class_weights").class_weights = of_classes.to(device)
        state = building.distribute(
            self.recipe, model, lambda: shards[0].batch, total_steps=facts.total_steps, device=device
        )
        if scaler := state.precision.state_dict():
            state.precision.load_state_dict({**scaler, "scale": facts.scale})
        own = state.strategy.state()
        shapes = [{(name, tuple(tensor.shape)) for name, tensor in each.items()} for each in (own, weights)]
        if wrong := sorted(shapes[0] ^ shapes[1]):
            raise ModelError(f"the bundle belongs to another model: {wrong[0][0]} is missing, or has another shape")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
        found = chosen(state, shards, self.request.shard)
        if self.request.debugs:
            debug(model, state, found[0])
        try:
            write(self.recipe.folder, opened(model, state, shards, shard=self.request.shard, data=None))
        except (LookupError, RuntimeError) as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise ModelError(f"the samples of the bundle do not fit its model ({what})") from error
        then = RunTrace().add(facts.trace)
        now = RunTrace().add(line for each in shards for line in traced(model, state, each))
        difference = first_difference(then, now)
        lines = [line for lines in now.steps[shards[0].step].shards.values() for line in lines]
        hashes = sum(line["kind"] in ("call", "gradient") for line in lines)
        text = explained(difference, now, COMPARED) if difference else ""
        storage.write(self.recipe.folder / SAME_HASHES, json.dumps({"hashes": hashes, "difference": text}))


build = ReplayTask
