"""Evaluation: each process runs its part of the samples; rank 0 writes what comes out."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.base import plugins, storage
from lockstep.base.errors import ModelError
from lockstep.base.events import Preparing
from lockstep.base.model_contracts import Batch
from lockstep.base.world import World
from lockstep.core.distributed.collectives import all_gather_object, raise_on_all_ranks
from lockstep.core.host.signals import SignalWatch
from lockstep.data.bad_samples import Faults
from lockstep.data.dataset import Subset
from lockstep.inference.evaluate import evaluation_page, evaluation_report, figures
from lockstep.inference.evaluate.calibration import fitted
from lockstep.inference.evaluate.evaluated_model import Opened, of_export, of_run
from lockstep.inference.evaluate.evaluation_request import EvaluationRequest
from lockstep.inference.export import export_facts as telling
from lockstep.inference.export.export_facts import Calibration
from lockstep.run.evaluation_setup import evaluate_source
from lockstep.run.recipe import Recipe
from lockstep.run.tasks._task import WatchedTask
from lockstep.training.evaluation import Evaluation, Predictions, Subject

NEEDS_GROUP = True


class EvaluateTask(WatchedTask):
    """A process's part of an evaluation."""

    def __init__(self, request: EvaluationRequest, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.request = request
        self.left_out: list[int] = []
        """Samples that could not be read (data.on_bad_sample=skip)."""
        self.kept: np.ndarray | None = None
        """Where there are such, the others."""

    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Measure, and write down what comes out; there is nothing to resume."""
        request = self.request
        if self.world.is_main:
            self.bus.subscribe(plugins.find("observe.sinks", "progress").terminal())
        opened = of_export(self, request) if request.is_export else of_run(self, request)
        classes = len(opened.spec.labels)
        skips = self.recipe.data.skips
        faults = Faults(name=request.data, split=request.split, skips=skips, warn=self.warn)
        found = evaluate_source(
            self.recipe,
            self.watched(opened),
            opened.source,
            world=self.world,
            pad_id=opened.pad_id,
            faults=faults,
            predictions=Predictions(len(opened.source), classes) if classes > 1 else None,
        )
        self.left_out = sorted(set().union(*all_gather_object(faults.known)))
        with raise_on_all_ranks():
            if self.world.is_main:
                self.write(*self.without(opened, found))

    def without(self, opened: Opened, found: Evaluation) -> tuple[Opened, Evaluation]:
        """The same without the samples that could not be read, of which nothing was predicted."""
        if not self.left_out or found.predictions is None:
            return opened, found
        self.kept = kept = np.setdiff1d(np.arange(len(opened.source)), self.left_out)
        predictions = Predictions(len(kept), found.predictions.logits.shape[1])
        predictions.logits, predictions.labels = found.predictions.logits[kept], found.predictions.labels[kept]
        return replace(opened, source=Subset(opened.source, kept)), replace(found, predictions=predictions)

    def watched(self, opened: Opened) -> Subject:
        """The same, with its progress on the terminal."""
        size = self.recipe.evaluate.micro_batch or self.recipe.train.micro_batch
        samples, at_once = len(opened.source), size * self.world.size
        rounds = count(1)

        def forward(batch: Batch) -> Tensor:
            outputs = opened.subject.forward(batch)
            done = min(next(rounds) * at_once, samples)
            self.bus.publish(Preparing(what="measuring samples", done=done, total=samples))
            return outputs

        return replace(opened.subject, forward=forward)

    def write(self, opened: Opened, found: Evaluation) -> None:
        """Write evaluation.json, evaluation.html, confusion.svg, and the temperature. Raises ModelError."""
        facts: dict[str, Any] = {
            **found.values,
            "checkpoint": str(self.request.target),
            "step": opened.step,
            "digest": opened.digest,
            "data": self.request.data,
            "samples": found.samples,
            **({"bad_samples": self.left_out} if self.left_out else {}),
            "metrics": found.values,
            "confusion_matrix": found.confusion,
        }
        wrong: list[evaluation_report.Misclassified] = []
        if found.predictions is not None:
            more, wrong = self.details(opened, found.predictions)
            facts |= more
        elif self.request.calibrates:
            raise ModelError("--calibrate needs a classifier: one row of logits for each sample, and its label")
        matrix = figures.confusion(found.confusion, opened.spec.labels) if found.confusion else ""
        try:
            if matrix:
                storage.write(self.request.to / "confusion.svg", matrix)
            else:
                (self.request.to / "confusion.svg").unlink(missing_ok=True)  # an earlier evaluation's
            storage.write(self.request.to / "evaluation.html", evaluation_page.html(facts, wrong, matrix=matrix))
            storage.write(self.request.to / "evaluation.json", json.dumps(facts, indent=1))
        except OSError as error:
            raise ModelError(f"cannot write to {self.request.to}: {error.strerror}; choose another with --to") from None

    def details(
        self, opened: Opened, predictions: Predictions
    ) -> tuple[dict[str, Any], list[evaluation_report.Misclassified]]:
        """What can be told where it is known what was predicted of each sample."""
        names, temperature, source = opened.spec.labels, opened.temperature, opened.source
        evaluation_report.check(predictions, source)
        wrong = evaluation_report.worst(predictions, source, names, count=self.request.worst, temperature=temperature)
        if self.kept is not None:
            wrong = [replace(one, index=int(self.kept[one.index])) for one in wrong]
        facts = {
            **evaluation_report.confidences(predictions, temperature),
            "classes": evaluation_report.by_class(predictions, names),
            "worst": [
                {name: getattr(one, name) for name in ("index", "origin", "label", "predicted", "confidence", "loss")}
                for one in wrong
            ],
        }
        if self.request.calibrates:
            found = fitted(predictions.logits, predictions.labels)
            is_kept = found.ece_after < found.ece_before
            if is_kept:
                self.keep(found, opened)
            facts["calibration"] = {**found.model_dump(mode="json"), "is_kept": is_kept}
        return facts, wrong

    def keep(self, found: Calibration, opened: Opened) -> None:
        """Store a temperature where predictions will find it: in the export, or beside the run."""
        folder = self.request.target if self.request.is_export else self.recipe.folder
        try:
            if self.request.is_export:
                facts = telling.read(folder)
                if facts.digest != opened.digest:
                    raise ModelError(f"{folder} has been replaced meanwhile: evaluate it again")
                telling.write(facts.model_copy(update={"calibration": found}), folder)
            else:
                telling.keep_calibration(found, folder, digest=opened.digest)
        except OSError as error:
            raise ModelError(f"cannot keep the calibration in {folder}: {error.strerror}") from None


def build(
    recipe: Recipe, world: World, signals: SignalWatch, *, request: Path | None = None, began: float = 0.0
) -> EvaluateTask:
    """The task that a file asks for."""
    assert request is not None
    asked = EvaluationRequest.model_validate_json(request.read_bytes())
    return EvaluateTask(asked, recipe, world, signals, began=began)
