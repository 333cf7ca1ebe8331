"""The model that is measured, out of a run or out of an export, with the samples that it is measured on."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lockstep.base.contracts import DataSpec, Source, Tokenizer
from lockstep.base.errors import DataError
from lockstep.checkpoint import layout
from lockstep.checkpoint.weights import restore
from lockstep.core.distributed.collectives import local_main_first, raise_on_all_ranks
from lockstep.core.distributed.process_group import world_group
from lockstep.core.numerics.digest import digest_of, world_lines
from lockstep.data.dataset import open_source, with_tokens
from lockstep.inference.evaluate.evaluation_request import EvaluationRequest
from lockstep.inference.evaluate.evaluation_samples import of_file, unchanged
from lockstep.inference.export import export_facts as telling
from lockstep.inference.export import export_reader
from lockstep.inference.export.export_facts import Calibration
from lockstep.inference.export.round_trip import outputs
from lockstep.run.tasks._task import WatchedTask
from lockstep.training.evaluation import EvaluationTarget
from lockstep.training.metrics.declared_metrics import declared_metrics
from lockstep.training.metrics.requested_metrics import is_requested


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model with what belongs to it."""

    subject: EvaluationTarget
    spec: DataSpec
    source: Source
    """What it is measured on."""
    pad_id: int
    step: int
    digest: str
    """Of its weights as they were trained."""
    calibration: Calibration | None

    @property
    def temperature(self) -> float:
        """What logits are divided by before they become probabilities."""
        return self.calibration.temperature if self.calibration else 1.0


def of_run(job: WatchedTask, task: EvaluationRequest) -> Opened:
    """The model of a checkpoint, spread as its strategy spreads it. Every rank calls it. Raises UserError."""
    parts = job.assemble()
    averaged = {name: parts.strategy.sharded(name, p.detach()) for name, p in parts.state.module.named_parameters()}
    restore(parts.strategy.state(), averaged, task.target)
    parts.model.eval()
    digest = digest_of(world_lines(parts.strategy.state(), world_group()))
    spec, tokenizer, source = parts.data.test.spec, parts.data.tokenizer, parts.data.test
    if task.file is not None:
        source = EvaluatedSamples(task=task, spec=spec, tokenizer=tokenizer, job=job).everywhere()
    elif task.split == "train":
        source = unchanged(parts.data.train)
    return Opened(
        subject=parts.subject,
        spec=spec,
        source=source,
        pad_id=parts.data.pad_id,
        step=layout.read_manifest(task.target).step,
        digest=digest,
        calibration=telling.kept_calibration(job.recipe.folder, digest=digest),
    )


def of_export(job: WatchedTask, task: EvaluationRequest) -> Opened:
    """What an export computes; each process opens the whole of it. Every rank calls it. Raises UserError."""
    folder, asked = task.target, job.recipe.evaluate.metrics
    with raise_on_all_ranks():
        facts = telling.read(folder)
        forward = export_reader.forward_of(folder, facts)
        tokenizer = export_reader.tokenizer_of(folder, facts)
        loss, found = (
            export_reader.loss_of(folder, facts, forward),
            declared_metrics(facts.spec, export_reader.metrics_of(folder, facts)),
        )
    device = torch.device("cpu")
    if isinstance(forward, nn.Module):
        device = job.device
        forward = forward.to(device)
    return Opened(
        subject=EvaluationTarget(
            forward=lambda batch: outputs(forward, batch),
            loss=loss,
            metrics={name: each for name, each in found.items() if is_requested(name, asked)},
            requested=asked,
            device=device,
        ),
        spec=facts.spec,
        source=EvaluatedSamples(task=task, spec=facts.spec, tokenizer=tokenizer, job=job).everywhere(),
        pad_id=tokenizer.pad_id if tokenizer else 0,
        step=facts.step,
        digest=facts.digest,
        calibration=facts.calibration,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluatedSamples:
    """Those of a file, or of a split, as the model takes them."""

    task: EvaluationRequest
    spec: DataSpec
    tokenizer: Tokenizer | None
    job: WatchedTask

    def everywhere(self) -> Source:
        """Open them on every rank: what has to be made for it is made by one process of each machine."""
        local_main_first(self.opened, is_local_main=self.job.world.local_rank == 0)
        with raise_on_all_ranks():
            return self.opened()

    def opened(self) -> Source:
        """With tokens in the place of texts, where the model takes these. Raises DataError."""
        data, tokenizer = self.job.recipe.data, self.tokenizer
        source = open_source(data, self.task.split) if self.task.file is None else self._of_file(self.task.file)
        if source.spec.labels != self.spec.labels:
            raise DataError(
                f"data.kind={data.kind} has the labels {_short(source.spec.labels)}, but the model has "
                f"{_short(self.spec.labels)}: give the data that it was trained on, or other samples with --file"
            )
        return with_tokens(source, data, tokenizer, publish=self.job.bus.publish) if tokenizer else source

    def _of_file(self, file: Path) -> Source:
        return of_file(
            file,
            self.spec,
            text_column=self.task.text_column,
            label_column=self.task.label_column,
            takes_tokens=self.tokenizer is not None,
        )


def _short(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:5]) + (", ..." if len(labels) > 5 else "")
