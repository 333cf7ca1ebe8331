"""A process of an evaluation: runs its part of the samples; rank 0 writes what comes out.

python -m lockstep.run.tasks.evaluate CONFIG.yaml --task TASK.json [the worker's own arguments]
"""

# ruff: noqa: E402 (as in the worker: the imports take seconds)
import sys

from lockstep.core.host.lifetime import begin

if __name__ == "__main__":
    begin(sys.argv)

import argparse
import json
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
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
from lockstep.inference.evaluate import evaluation_page, evaluation_report, figures
from lockstep.inference.evaluate.calibration import fitted
from lockstep.inference.evaluate.evaluated_model import Opened, of_export, of_run
from lockstep.inference.evaluate.evaluation_request import EvaluationRequest
from lockstep.inference.export import export_facts as telling
from lockstep.inference.export.export_facts import Calibration
from lockstep.run import build, worker
from lockstep.run.tasks.train import TrainTask
from lockstep.training.evaluation import Evaluation, Predictions, Subject


class EvaluateTask(TrainTask):
    """A process's part of an evaluation."""

    def __init__(self, task: EvaluationRequest, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.task = task
        self.left_out: list[int] = []
        """Samples that could not be read (data.on_bad_sample=skip)."""
        self.kept: np.ndarray | None = None
        """Where there are such, the others."""

    def train(self, how: str, *, allow_drift: bool) -> None:
        """Measure, and write down what comes out, in the place of training."""
        task = self.task
        if self.world.is_main:
            self.bus.subscribe(plugins.find("observe.sinks", "progress").terminal())
        opened = of_export(self, task) if task.is_export else of_run(self, task)
        classes = len(opened.spec.labels)
        skips = self.recipe.data.skips
        faults = Faults(name=task.data, split=task.split, skips=skips, warn=self.warn)
        found = build.evaluated(
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
                self.tell(*self.without(opened, found))

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

    def tell(self, opened: Opened, found: Evaluation) -> None:
        """Write evaluation.json, evaluation.html, confusion.svg, and the temperature. Raises ModelError."""
        facts: dict[str, Any] = {
            **found.values,
            "checkpoint": str(self.task.target),
            "step": opened.step,
            "digest": opened.digest,
            "data": self.task.data,
            "samples": found.samples,
            **({"bad_samples": self.left_out} if self.left_out else {}),
            "metrics": found.values,
            "confusion_matrix": found.confusion,
        }
        wrong: list[evaluation_report.Misclassified] = []
        if found.predictions is not None:
            more, wrong = self.details(opened, found.predictions)
            facts |= more
        elif self.task.calibrates:
            raise ModelError("--calibrate needs a classifier: one row of logits for each sample, and its label")
        matrix = figures.confusion(found.confusion, opened.spec.labels) if found.confusion else ""
        try:
            if matrix:
                storage.write(self.task.to / "confusion.svg", matrix)
            else:
                (self.task.to / "confusion.svg").unlink(missing_ok=True)  # an earlier evaluation's
            storage.write(self.task.to / "evaluation.html", evaluation_page.html(facts, wrong, matrix=matrix))
            storage.write(self.task.to / "evaluation.json", json.dumps(facts, indent=1))
        except OSError as error:
            raise ModelError(f"cannot write to {self.task.to}: {error.strerror}; choose another with --to") from None

    def details(
        self, opened: Opened, predictions: Predictions
    ) -> tuple[dict[str, Any], list[evaluation_report.Misclassified]]:
        """What can be told where it is known what was predicted of each sample."""
        names, temperature, source = opened.spec.labels, opened.temperature, opened.source
        evaluation_report.check(predictions, source)
        wrong = evaluation_report.worst(predictions, source, names, count=self.task.worst, temperature=temperature)
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
        if self.task.calibrates:
            found = fitted(predictions.logits, predictions.labels)
            is_kept = found.ece_after < found.ece_before
            if is_kept:
                self.keep(found, opened)
            facts["calibration"] = {**found.model_dump(mode="json"), "is_kept": is_kept}
        return facts, wrong

    def keep(self, found: Calibration, opened: Opened) -> None:
        """Store a temperature where predictions will find it: in the export, or beside the run."""
        folder = self.task.target if self.task.is_export else self.recipe.folder
        try:
            if self.task.is_export:
                facts = telling.read(folder)
                if facts.digest != opened.digest:
                    raise ModelError(f"{folder} has been replaced meanwhile: evaluate it again")
                telling.write(facts.model_copy(update={"calibration": found}), folder)
            else:
                telling.keep_calibration(found, folder, digest=opened.digest)
        except OSError as error:
            raise ModelError(f"cannot keep the calibration in {folder}: {error.strerror}") from None


def main(argv: list[str]) -> int:
    """Run one process to its end; returns its exit code."""
    parser = argparse.ArgumentParser(prog="lockstep.run.tasks.evaluate", allow_abbrev=False)
    parser.add_argument("--task", type=Path, required=True)
    options, rest = parser.parse_known_args(argv)
    task = EvaluationRequest.model_validate_json(options.task.read_bytes())
    return worker.main(rest, partial(EvaluateTask, task), guards=True)


if __name__ == "__main__":
    worker.leave(main(sys.argv[1:]))
