"""How an evaluation follows from a recipe: its micro-batches and its metrics."""

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec, Source
from lockstep.base.world import World
from lockstep.data.bad_samples import Faults
from lockstep.data.loader import Loader
from lockstep.data.sampler import EvaluationRequests
from lockstep.run.recipe import Recipe
from lockstep.training.evaluation import Evaluation, Predictions, Subject, evaluate
from lockstep.training.metrics.declared_metrics import Measure, measures
from lockstep.training.metrics.requested_metrics import is_asked


def evaluate_source(
    recipe: Recipe,
    subject: Subject,
    source: Source,
    *,
    world: World,
    pad_id: int,
    faults: Faults,
    predictions: Predictions | None = None,
) -> Evaluation:
    """Measure a model on every sample of a source once, except unreadable ones that may be skipped."""
    requests = evaluation_requests(recipe, source, world)
    seed, device = recipe.run.seed, subject.device
    batches = Loader(source, requests, faults=faults, seed=seed, pad_id=pad_id, workers=0, device=device)
    result = evaluate(subject, batches, total=requests.total, predictions=predictions)
    assert faults.skips or result.samples == len(source), (result.samples, len(source))
    return result


def evaluation_requests(recipe: Recipe, source: Source, world: World) -> EvaluationRequests:
    """The micro-batches of a source that this rank evaluates."""
    return EvaluationRequests(
        samples=len(source),
        lengths=source.lengths,
        micro_batch=recipe.evaluate.micro_batch or recipe.train.micro_batch,
        rank=world.rank,
        world_size=world.size,
    )


def requested_measures(recipe: Recipe, spec: DataSpec) -> dict[str, Measure]:
    """The metrics of an evaluation by name, including those of the user's code. Raises ModelError."""
    own = plugins.hook("models", recipe.model.kind, "metrics")
    known = measures(spec, own(recipe.model, spec) if own else {})
    return {name: measure for name, measure in known.items() if is_asked(name, recipe.evaluate.metrics)}
