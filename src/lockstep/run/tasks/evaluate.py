"""Evaluation: each process runs its share of the samples; rank 0 writes the results."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count as counting
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.base import plugins, storage
from lockstep.base.errors import ModelError
from lockstep.base.events import Preparing
from lockstep.base.model_contracts import Batch
from lockstep.core.distributed.collectives import all_gather_object, raise_on_all_ranks
from lockstep.data.bad_samples import Faults
from lockstep.data.dataset import Subset
from lockstep.data.text_tokenizers import TextTokenizer
from lockstep.inference.evaluate import evaluation_page, evaluation_report, figures
from lockstep.inference.evaluate.calibration import fitted
from lockstep.inference.evaluate.evaluation_request import EvaluationRequest
from lockstep.inference.export import export_facts
from lockstep.inference.export.export_facts import Calibration
from lockstep.models.objectives._objective import PredictingObjective
from lockstep.recipe.components import evaluate_source
from lockstep.run.evaluated_model import Opened, of_export, of_run
from lockstep.run.tasks._task import WatchedTask
from lockstep.training.evaluation import Evaluation, EvaluationTarget, Predictions

NEEDS_GROUP = True
SHOWN = ("index", "origin", "label", "predicted", "confidence", "loss", "text")
"""Fields of a sample in evaluation.json."""
MOST_IMAGE_CHARACTERS = 1 << 16


class EvaluateTask(WatchedTask):
    """The work of one process in an evaluation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request = self.asked(EvaluationRequest)
        self.skipped: list[int] = []
        """Indices of unreadable samples (data.on_bad_sample=skip)."""
        self.kept: np.ndarray | None = None
        """Indices of all other samples, if any are skipped."""

    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Evaluate and write the results; nothing is resumed."""
        request = self.request
        if self.world.is_main:
            self.bus.subscribe(plugins.find("observe.sinks", "progress").terminal())
        opened = of_export(self, request) if request.is_export else of_run(self, request)
        skips = self.recipe.data.skips
        faults = Faults(name=request.data, split=request.split, skips=skips, warn=self.warn)
        evaluation = evaluate_source(
            self.recipe,
            self.with_progress(opened),
            opened.source,
            world=self.world,
            pad_id=opened.tokenizer.pad_id if opened.tokenizer else 0,
            faults=faults,
            predictions=Predictions(len(opened.source), partial(opened.objective.rows, spec=opened.spec)),
        )
        self.skipped = sorted(set().union(*all_gather_object(faults.known)))
        with raise_on_all_ranks():
            if self.world.is_main:
                self.write(*self.without_skipped(opened, evaluation))

    def without_skipped(self, opened: Opened, evaluation: Evaluation) -> tuple[Opened, Evaluation]:
        """Drop skipped samples, which have no predictions."""
        old = evaluation.predictions
        if not self.skipped or old is None:
            return opened, evaluation
        self.kept = kept = np.setdiff1d(np.arange(len(opened.source)), self.skipped)
        return replace(opened, source=Subset(opened.source, kept)), replace(evaluation, predictions=old.part(kept))

    def with_progress(self, opened: Opened) -> EvaluationTarget:
        """Publish progress with every forward pass."""
        size = self.recipe.evaluate.micro_batch or self.recipe.train.micro_batch
        samples, at_once = len(opened.source), size * self.world.size
        rounds = counting(1)

        def forward(batch: Batch) -> Tensor:
            outputs = opened.subject.forward(batch)
            done = min(next(rounds) * at_once, samples)
            self.bus.publish(Preparing(what="measuring samples", done=done, total=samples))
            return outputs

        return replace(opened.subject, forward=forward)

    def write(self, opened: Opened, evaluation: Evaluation) -> None:
        """Write evaluation.json, evaluation.html, confusion.svg, and the temperature. Raises ModelError."""
        facts: dict[str, Any] = {
            **evaluation.values,
            "checkpoint": str(self.request.target),
            "step": opened.step,
            "digest": opened.digest,
            "data": self.request.data,
            "samples": evaluation.samples,
            **({"bad_samples": self.skipped} if self.skipped else {}),
            "metrics": evaluation.values,
            "confusion_matrix": evaluation.confusion,
        }
        wrong: list[evaluation_report.HighLossSample] = []
        objective, predictions = opened.objective, evaluation.predictions
        calibrates = isinstance(objective, PredictingObjective) and objective.CALIBRATES and predictions is not None
        if self.request.calibrates and not calibrates:
            raise ModelError("--calibrate needs a classifier: one row of logits for each sample, and its label")
        if isinstance(objective, PredictingObjective) and predictions is not None:
            details, wrong = self.details(opened, objective, predictions)
            facts |= details
        elif predictions is not None and isinstance(opened.tokenizer, TextTokenizer):
            evaluation_report.check(predictions, opened.source)
            wrong = evaluation_report.worst_texts(
                predictions, opened.source, opened.tokenizer, count=self.request.worst
            )
            facts["worst"] = shown(wrong)
        matrix = figures.confusion(evaluation.confusion, opened.spec.labels) if evaluation.confusion else ""
        try:
            if matrix:
                storage.write(self.request.to / "confusion.svg", matrix)
            else:
                (self.request.to / "confusion.svg").unlink(missing_ok=True)  # of an earlier evaluation
            storage.write(self.request.to / "evaluation.html", evaluation_page.html(facts, wrong, matrix=matrix))
            storage.write(self.request.to / "evaluation.json", json.dumps(facts, indent=1))
            if self.request.to == self.recipe.folder and "tensorboard" in self.recipe.observe.sinks:
                board = self.recipe.folder / "tensorboard"
                evaluation_page.write_tensorboard(wrong, board, step=opened.step, data=self.request.data)
        except OSError as error:
            raise ModelError(f"cannot write to {self.request.to}: {error.strerror}; choose another with --to") from None

    def details(
        self, opened: Opened, objective: PredictingObjective, predictions: Predictions
    ) -> tuple[dict[str, Any], list[evaluation_report.HighLossSample]]:
        """Return what follows from the predictions: calibration, metrics per class, the worst samples."""
        spec, source, count = opened.spec, opened.source, self.request.worst
        temperature = opened.calibration.temperature if opened.calibration else 1.0
        evaluation_report.check(predictions, source)
        wrong = evaluation_report.worst(
            predictions, source, spec, objective=objective, count=count, temperature=temperature
        )
        if self.kept is not None:
            wrong = [replace(sample, index=int(self.kept[sample.index])) for sample in wrong]
        facts: dict[str, Any] = {"worst": shown(wrong)}
        if objective.CALIBRATES:
            facts |= evaluation_report.confidences(predictions, temperature)
        if (fits := objective.fits(predictions.outputs)) is not None:
            facts["classes"] = evaluation_report.by_class(fits, predictions.targets, spec.labels)
        if self.request.calibrates:
            calibration = fitted(predictions.outputs, predictions.targets)
            is_kept = calibration.ece_after < calibration.ece_before
            if is_kept:
                self.store(calibration, opened)
            facts["calibration"] = {**calibration.model_dump(mode="json"), "is_kept": is_kept}
        return facts, wrong

    def store(self, calibration: Calibration, opened: Opened) -> None:
        """Store a temperature for predictions: in the export, or in the run folder."""
        folder = self.request.target if self.request.is_export else self.recipe.folder
        try:
            if self.request.is_export:
                facts = export_facts.read(folder)
                if facts.digest != opened.digest:
                    raise ModelError(f"{folder} has been replaced meanwhile: evaluate it again")
                export_facts.write(facts.model_copy(update={"calibration": calibration}), folder)
            else:
                export_facts.keep_calibration(calibration, folder, digest=opened.digest)
        except OSError as error:
            raise ModelError(f"cannot keep the calibration in {folder}: {error.strerror}") from None


def shown(samples: Sequence[evaluation_report.HighLossSample]) -> list[dict[str, Any]]:
    """Format samples for evaluation.json."""
    return [{**{name: getattr(sample, name) for name in SHOWN}, "image": _small_image(sample)} for sample in samples]


def _small_image(sample: evaluation_report.HighLossSample) -> str:
    """Return a sample's image as a data URI; empty where it is larger than a JSON file should hold."""
    image = evaluation_page.data_uri(sample.columns)
    return image if len(image) <= MOST_IMAGE_CHARACTERS else ""


build = EvaluateTask
