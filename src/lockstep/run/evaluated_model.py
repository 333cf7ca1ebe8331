"""The model and the samples of an evaluation, from a run or from an export."""

from dataclasses import dataclass

import torch
from torch import nn

from lockstep.base.contracts import DataSpec, Source, Tokenizer
from lockstep.base.errors import DataError
from lockstep.base.model_contracts import Model
from lockstep.checkpoint import layout
from lockstep.checkpoint.weights import restore
from lockstep.core.distributed.collectives import local_main_first, raise_on_all_ranks
from lockstep.core.distributed.process_group import world_group
from lockstep.core.numerics.digest import digest_of, world_lines
from lockstep.data.dataset import measurable, open_source, packed, with_tokens
from lockstep.data.processors import Processor
from lockstep.data.text_tokenizers import TextTokenizer
from lockstep.inference.evaluate.evaluation_request import EvaluationRequest
from lockstep.inference.evaluate.evaluation_samples import of_file, without_augmentation
from lockstep.inference.export import export_facts, export_reader
from lockstep.inference.export.export_facts import Calibration
from lockstep.inference.export.round_trip import outputs
from lockstep.models.metrics.declared_metrics import declared_metrics, is_requested
from lockstep.models.objectives._choice import objective_of, with_objective
from lockstep.models.objectives._objective import Objective
from lockstep.recipe.splits import check_classes
from lockstep.run.tasks._task import WatchedTask
from lockstep.training.evaluation import EvaluationTarget


@dataclass(frozen=True, kw_only=True)
class Opened:
    subject: EvaluationTarget
    spec: DataSpec
    source: Source
    tokenizer: Tokenizer | None
    step: int
    digest: str
    """Digest of the trained weights."""
    calibration: Calibration | None

    @property
    def objective(self) -> Objective:
        return objective_of(self.spec)


def of_run(job: WatchedTask, task: EvaluationRequest) -> Opened:
    """Load the model of a checkpoint, sharded by its strategy, and open the samples. Collective. Raises UserError."""
    components, manifest = job.assemble(), layout.read_manifest(task.target)
    with raise_on_all_ranks():
        check_classes(components.data.train.spec, manifest.numeric)
    averaged = {
        name: components.strategy.sharded(name, p.detach()) for name, p in components.state.module.named_parameters()
    }
    restore(components.strategy.state(), averaged, task.target)
    components.model.eval()
    digest = digest_of(world_lines(components.strategy.state(), world_group()))
    tokenizer, source = components.data.tokenizer, components.data.test
    spec = with_objective(source.spec, job.recipe.model.objective)
    if task.file is not None:
        processor = components.data.processor
        source = open_samples(job, task, spec, tokenizer=tokenizer, processor=processor)
    elif task.split == "train":
        source = without_augmentation(components.data.train)
    return Opened(
        subject=components.subject,
        spec=spec,
        source=source,
        tokenizer=tokenizer,
        step=manifest.step,
        digest=digest,
        calibration=export_facts.kept_calibration(job.recipe.folder, digest=digest),
    )


def of_export(job: WatchedTask, task: EvaluationRequest) -> Opened:
    """Load the model of an export, whole in each process, and open the samples. Collective. Raises UserError."""
    folder, requested = task.target, job.recipe.evaluate.metrics
    with raise_on_all_ranks():
        facts = export_facts.read(folder, task.base)
        forward = export_reader.forward_of(folder, facts)
        tokenizer = export_reader.tokenizer_of(folder, facts)
        processor = export_reader.processor_of(folder, facts)
        loss = export_reader.loss_of(folder, facts, forward)
        metrics = declared_metrics(facts.learned.metrics(facts.spec), export_reader.metrics_of(folder, facts))
    device = torch.device("cpu")
    if isinstance(forward, nn.Module):
        device = job.device
        forward = forward.to(device)
    return Opened(
        subject=EvaluationTarget(
            forward=lambda batch: outputs(forward, batch),
            loss=loss,
            derived=forward.derived if isinstance(forward, Model) else facts.learned.derived,
            metrics={name: metric for name, metric in metrics.items() if is_requested(name, requested)},
            requested=requested,
            device=device,
        ),
        spec=facts.spec,
        source=open_samples(job, task, facts.spec, tokenizer=tokenizer, processor=processor),
        tokenizer=tokenizer,
        step=facts.step,
        digest=facts.digest,
        calibration=facts.calibration,
    )


def open_samples(
    job: WatchedTask,
    task: EvaluationRequest,
    spec: DataSpec,
    *,
    tokenizer: Tokenizer | None,
    processor: Processor | None,
) -> Source:
    """Open the samples of a file or a split, tokenized if the model takes tokens; one process of each machine writes
    caches. Collective. Raises DataError."""

    def opened() -> Source:
        data, split, publish = job.recipe.data, task.split, job.bus.publish
        if task.file is not None and data.PACKS:
            if "test" not in type(data).model_fields:
                raise DataError(f"data.kind={data.kind} reads no such file: leave --file out, or set data.kind=text")
            data, split = data.model_copy(update={"test": task.file}), "test"
        if task.file is None or data.PACKS:
            source = measurable(open_source(data, split), job.recipe.evaluate.limit)
        else:
            columns = {"text_column": task.text_column, "label_column": task.label_column}
            source = of_file(task.file, spec, processor, **columns, takes_tokens=tokenizer is not None)
        given, wanted = (each.labels or each.numbers for each in (source.spec, spec))
        if given != wanted:
            raise DataError(
                f"data.kind={data.kind} has the labels {_short(given)}, but the model has {_short(wanted)}: give the "
                "data that it was trained on, or other samples with --file"
            )
        if data.PACKS and isinstance(tokenizer, TextTokenizer):
            return packed(source, data, tokenizer, publish=publish)
        return with_tokens(source, data, tokenizer, publish=publish) if tokenizer else source

    local_main_first(opened, is_local_main=job.world.local_rank == 0)
    with raise_on_all_ranks():
        return opened()


def _short(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:5]) + (", ..." if len(labels) > 5 else "")
