"""Every metric has the same value on any number of processes, whatever its states and however they are reduced."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric, MinMetric, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryPrecisionRecallCurve,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.regression import (
    ConcordanceCorrCoef,
    KendallRankCorrCoef,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.wrappers import BootStrapper, MinMaxMetric, MultioutputWrapper, Running

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import EvaluationFailed, LockstepError, ModelError
from lockstep.base.model_contracts import LossSum, MicroBatch
from lockstep.data.sampler import EvaluationRequests
from lockstep.models.metrics.declared_metrics import declared_metrics
from lockstep.models.metrics.metric_tally import MergedTally, SumTally, tally
from lockstep.models.objectives._choice import objective_of
from lockstep.training.evaluation import Evaluation, EvaluationTarget, evaluate, trial_evaluation

pytestmark = [pytest.mark.filterwarnings("ignore:Metric `.*` will save all targets")]
SAMPLES, SIZE = 83, 8
PLAIN = DataSpec(modality="numbers", labels=())


def of_classes(count):
    return DataSpec(modality="numbers", labels=tuple(map(str, range(count))))


class Custom(Metric):
    """Reduced by a function of its own."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("worst", torch.zeros(()), dist_reduce_fx=lambda stacked: stacked.sum(0).sqrt())

    def update(self, outputs, target):
        self.worst += (outputs - target).abs().pow(1.5).sum()

    def compute(self):
        return self.worst


class Unreduced(Metric):
    """What an update does depends on all before it, and states are not reduced."""

    def __init__(self):
        super().__init__()
        self.add_state("running", torch.tensor(0.5), dist_reduce_fx=None)
        self.steps = []

    def update(self, outputs, target):
        self.running = 0.9 * self.running + 0.1 * (outputs - target).abs().mean()
        self.steps.append(float(self.running))

    def compute(self):
        return self.running + len(self.steps)


class Meant(Metric):
    """A mean of means."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, outputs, target):
        self.value = self.value + (outputs - target).square().mean()

    def compute(self):
        return self.value


class Hidden(Metric):
    """Holds others in a list, where torch does not see them."""

    def __init__(self):
        super().__init__()
        self.others = [MeanSquaredError(), {"p": PearsonCorrCoef()}]

    def update(self, outputs, target):
        self.others[0].update(outputs, target)
        self.others[1]["p"].update(outputs, target)

    def compute(self):
        return self.others[0].compute() * self.others[1]["p"].compute()


def only_outputs(outputs, batch):
    return (outputs,)


def by_name(outputs, batch):
    return {"preds": outputs, "target": batch["label"]}


def now_and_then(outputs, batch):
    return (outputs, batch["label"]) if batch["x"][0, 0] > 0 else None


def binary(outputs, batch):
    return outputs.sigmoid(), (batch["label"] > 0).long()


def everything():
    return {
        "mse": MeanSquaredError(),
        "rmse": (MeanSquaredError(squared=False), by_name),
        "mape": MeanAbsolutePercentageError(),
        "pearson": PearsonCorrCoef(),
        "spearman": SpearmanCorrCoef(),
        "kendall": KendallRankCorrCoef(),
        "concordance": ConcordanceCorrCoef(),
        "r2": R2Score(),
        "mean": (MeanMetric(), only_outputs),
        "sum": (SumMetric(), only_outputs),
        "min": (MinMetric(), only_outputs),
        "max": (MaxMetric(), only_outputs),
        "cat": (CatMetric(), only_outputs),
        "auroc": (BinaryAUROC(), binary),
        "binned": (BinaryAUROC(thresholds=7), binary),
        "curve": (BinaryPrecisionRecallCurve(thresholds=3), binary),
        "custom": Custom(),
        "unreduced": Unreduced(),
        "meant": Meant(),
        "hidden": Hidden(),
        "bootstrap": BootStrapper(MeanSquaredError(), num_bootstraps=4),
        "minmax": MinMaxMetric(MeanSquaredError()),
        "running": Running(MeanSquaredError(), window=3),
        "outputs": (MultioutputWrapper(R2Score(), 1), lambda o, b: (o[:, None], b["label"][:, None])),
        "composed": MeanSquaredError() / (PearsonCorrCoef() + 1) ** 2,
        "collection": MetricCollection({"a": MeanSquaredError(), "b": Meant()}),
        "sometimes": (MeanSquaredError(), now_and_then),
        "never": (MeanSquaredError(), lambda outputs, batch: None),
    }


def samples():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return x, x.sum(1) + torch.randn(SAMPLES, generator=generator)


def batches():
    x, y = samples()
    requests = EvaluationRequests(
        samples=SAMPLES, lengths=None, micro_batch=SIZE, rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    for request in requests:
        rows = list(request.indices)
        batch = {"x": x[rows], "label": y[rows]}
        yield MicroBatch(step=-1, shard=request.shard, indices=request.indices, batch=batch, ghost=request.ghost)


def forward(batch):
    return batch["x"] @ torch.linspace(0.1, 1.1, 5) + 0.01 * torch.randn(len(batch["x"]))


def squared(outputs, batch):
    error = outputs - batch["label"]
    return LossSum(error.square().sum(), len(error), {"mae": error.abs().sum(), "right": (error.abs() < 1).sum()})


def subject(own, loss=squared, **more):
    return EvaluationTarget(
        forward=forward, loss=loss, metrics=declared_metrics({}, own), device=torch.device("cpu"), **more
    )


def evaluated(is_local=True):
    torch.manual_seed(dist.get_rank())  # what a process has drawn before does not matter
    np.random.seed(dist.get_rank())
    random.seed(dist.get_rank())
    found = evaluate(subject(everything(), is_local=is_local), batches(), total=-(-SAMPLES // SIZE))
    assert isinstance(found, Evaluation) and found.samples == SAMPLES and found.confusion is None
    return {name: value.hex() for name, value in found.values.items()}


def test_every_metric_is_a_function_of_the_data_alone(ranks):
    found = {world: ranks(world, evaluated) for world in (1, 2, 3, 5)}
    alone = found[1][0]
    assert set(everything()) <= {name.partition(".")[0] for name in alone} | {"never"}
    for world, results in found.items():
        for rank, values in enumerate(results):
            assert {n for n in alone if values.get(n) != alone[n]} == set(), (world, rank)
    assert "never" not in alone
    assert {"loss", "mae", "right", "bootstrap.std", "minmax.max", "collection.b", "cat.82"} <= set(alone)
    assert ranks(3, evaluated, False)[1] == alone


def test_values_are_the_metrics_own(lone):
    """Those of the same updates in one process, without us."""
    own = everything()
    values = evaluate(subject(own), batches(), total=-(-SAMPLES // SIZE)).values
    plain = {name: metric for name, metric in everything().items() if isinstance(metric, Metric)}
    for micro_batch in batches():
        torch.manual_seed(0)
        for metric in plain.values():
            metric.update(forward(micro_batch.batch), micro_batch.batch["label"])
    for name in ("mse", "pearson", "spearman", "r2", "unreduced", "meant", "hidden", "composed"):
        assert values[name] == pytest.approx(float(plain[name].compute()), rel=2e-2), name
    mergeable = {
        name
        for name, each in declared_metrics({}, own).items()
        if type(tally(each, torch.device("cpu"))) is MergedTally
    }
    assert mergeable >= {"mse", "spearman", "r2", "mean", "sum", "cat", "auroc", "binned"}
    assert not mergeable & {"pearson", "custom", "unreduced", "meant", "hidden", "bootstrap", "composed", "collection"}


def fails_on(rank, where):
    """An evaluation in which one rank's user code raises, and what every rank hears of it."""

    def fail(*_):
        if dist.get_rank() == rank:
            raise ZeroDivisionError(f"from {where}")

    def adapter(outputs, batch):
        fail()
        return outputs, batch["label"]

    def loss(outputs, batch):
        if where == "loss":
            fail()
        return squared(outputs, batch)

    own = {"mse": (MeanSquaredError(), adapter if where == "adapter" else by_name)}
    if where == "compute":
        own["mse"][0].compute = fail
    try:
        evaluate(subject(own, loss), batches(), total=-(-SAMPLES // SIZE))
    except EvaluationFailed as error:
        dist.barrier()  # and all go on together
        return str(error), error.is_shared
    return None


@pytest.mark.parametrize(("rank", "where"), [(0, "adapter"), (2, "adapter"), (1, "loss"), (0, "compute")])
def test_an_error_of_one_rank_is_raised_by_all(ranks, rank, where):
    found = ranks(3, fails_on, rank, where)
    assert len(set(found)) == 1
    message, is_shared = found[0]
    assert is_shared
    assert f"ZeroDivisionError: from {where}" in message and "test_metrics.py" in message
    assert "lockstep/training/evaluation.py" not in message


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        (3, "gives a int for 'own': a metric is a torchmetrics.Metric"),
        ((MeanSquaredError(), 3), "gives a tuple of MeanSquaredError, int"),
        ((MeanSquaredError(), by_name, by_name), "gives a tuple of MeanSquaredError, function, function"),
    ],
)
def test_what_is_no_metric_is_named(declared, error):
    with pytest.raises(ModelError, match=error):
        declared_metrics({}, {"own": declared})


@pytest.mark.parametrize(
    ("own", "given"), [(None, "a NoneType"), ([MaxMetric()], "a list of MaxMetric"), (MaxMetric(), "a MaxMetric")]
)
def test_what_is_no_dict_of_metrics_is_told(own, given):
    with pytest.raises(ModelError, match=rf"metrics\(spec\) gives {given}: return a dict"):
        declared_metrics({}, own)


def first():
    return next(iter(batches()))


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        (MeanSquaredError(), "'own' cannot be shown anything: .* the column 'label', .* no such column .*there is: x"),
        ((MeanSquaredError(), lambda o, b: o), "'own' gives a Tensor: it gives a tuple of the arguments"),
        ((MeanSquaredError(), lambda o, b: (o, b["y"])), "KeyError: 'y'"),
    ],
)
def test_a_metric_that_cannot_be_shown_anything_is_told_before_training(lone, declared, error):
    micro_batch = first()
    batch = {"x": micro_batch.batch["x"]}
    bare = MicroBatch(step=-1, shard=0, indices=micro_batch.indices, batch=batch)
    with pytest.raises(LockstepError, match=f"(?s){error}"):
        trial_evaluation(subject({"own": declared}, lambda o, b: LossSum(o.square().sum(), len(o))), bare)


def test_names_are_known_before_training(lone):
    few = MicroBatch(step=-1, shard=0, indices=(0,), batch={"x": torch.ones(1, 5), "label": torch.ones(1)})
    own = {"r2": R2Score(), "m": MinMaxMetric(MeanSquaredError())}
    assert trial_evaluation(subject(own), few) == (["loss", "m.max", "m.min", "m.raw", "mae", "r2", "right"], False)
    own.pop("r2")
    assert trial_evaluation(subject(own), few) == (["loss", "m.max", "m.min", "m.raw", "mae", "right"], True)


def test_metrics_of_classifiers_are_for_classifiers(lone):
    """Labels [m] or [m, T], logits [m, classes] or [m, classes, T], also among other outputs; nothing else has an accuracy."""
    spec = DataSpec(modality="any", labels=("a", "b", "c"))
    found = objective_of(spec).metrics(spec)
    device = torch.device("cpu")

    def seen(outputs, label):
        contribution = tally(found["accuracy"], device).contribution(
            outputs, {"label": label} if label is not None else {}
        )
        return contribution is not None

    assert seen(torch.rand(4, 3), torch.tensor([0, 1, 2, 0]))
    assert seen(torch.rand(4, 3, 7), torch.zeros(4, 7, dtype=torch.int64))
    assert not seen(torch.rand(4, 3), torch.rand(4))
    assert not seen(torch.rand(4, 3), None)
    assert not seen(torch.rand(4, 2), torch.tensor([0, 1, 2, 0]))
    assert seen({"logits": torch.rand(4, 3)}, torch.tensor([0, 1, 2, 0]))
    assert not seen({"scores": torch.rand(4, 3)}, torch.tensor([0, 1, 2, 0]))
    assert set(declared_metrics(found, {"accuracy": None, "f1": None})) == {"confusion"}
    assert isinstance(tally(found["accuracy"], device), SumTally)


@settings(max_examples=60, deadline=None)
@given(classes=st.integers(2, 30), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 99))
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_classifiers_figures_are_those_of_torchmetrics(classes, sizes, seed, shape):
    """Bit for bit: also where classes are missing, never predicted, or tied."""
    generator = torch.Generator().manual_seed(seed)
    expected = {
        "accuracy": MulticlassAccuracy(classes, average="micro"),
        "f1": MulticlassF1Score(classes, average="macro"),
        "confusion": MulticlassConfusionMatrix(classes),
    }
    spec = of_classes(classes)
    found = {name: tally(each, torch.device("cpu")) for name, each in objective_of(spec).metrics(spec).items()}
    for number, size in enumerate(sizes):
        logits = torch.randint(0, 4, (size, classes, *shape), generator=generator).float()
        label = torch.randint(0, max(1, classes - seed % 3), (size, *shape), generator=generator)
        for name, each in expected.items():
            each.update(logits, label)
            contribution = found[name].contribution(logits, {"label": label})
            found[name].merge(number, found[name].read(contribution))
    assert {name: each.value().tolist() for name, each in found.items()} == {
        name: each.compute().tolist() for name, each in expected.items()
    }
