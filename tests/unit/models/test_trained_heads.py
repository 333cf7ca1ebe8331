"""Training goes on from a classifier: the rows of its head follow the names of its classes, or the head is new."""

import pytest
import torch
from exporting import text_case
from running import lockstep, summary
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from lockstep.base.contracts import DataSpec
from lockstep.models import _transformer as transformer

OURS = DataSpec(modality="text", labels=("bad", "good", "so so"))


@pytest.fixture
def classifier(tmp_path, minilm):
    text_case(tmp_path / "small", minilm)

    def saved(*names):
        """A classifier with a head of its own -> its folder, the rows of its head."""
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
        torch.manual_seed(0)
        network = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "small", num_labels=len(names), ignore_mismatched_sizes=True, **labels
        )
        torch.nn.init.normal_(network.classifier.bias)
        network.save_pretrained(tmp_path / "trained")
        AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / "trained")
        return tmp_path / "trained", {n: r for n, r in zip(names, rows_of(network), strict=True)}

    return saved


def rows_of(network):
    head = network.classifier
    return torch.cat([head.weight, head.bias[:, None]], 1).detach()


def taken_over(folder, spec=OURS):
    model = transformer.build(transformer.Config(kind="transformer", name=str(folder), max_length=16), spec)
    names = spec.labels or spec.numbers
    assert list(model.network.config.id2label.values()) == list(names)
    return dict(zip(names, rows_of(model.network), strict=True)), " ".join(model._lockstep_notes)


@pytest.mark.parametrize("names", [("bad", "good", "so so"), ("so so", "bad", "good"), ("good", "bad", "so so")])
def test_rows_follow_the_names(classifier, names):
    folder, trained = classifier(*names)
    found, notes = taken_over(folder)
    assert all(torch.equal(found[name], trained[name]) for name in OURS.labels)
    assert ("the rows of its head follow their names" in notes) == (names != OURS.labels)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("LABEL_0", "LABEL_1", "LABEL_2"),
            "a head for other classes (3 unnamed) than the data: a new head is trained",
        ),
        (("sad", "glad", "calm"), "a head for other classes (sad, glad, calm) than the data: a new head is trained"),
        (("bad", "good"), "a head for other classes (bad, good) than the data: a new head is trained"),
        (
            ("bad", "good", "so so", "great"),
            "a head for other classes (bad, good, so so and 1 more) than the data: a new head is trained",
        ),
    ],
)
def test_other_classes_get_a_new_head(classifier, names, said):
    """As an encoder gets one, from the same distribution."""
    folder, trained = classifier(*names)
    torch.manual_seed(7)
    found, notes = taken_over(folder)
    assert said in notes
    rows = torch.stack([*found.values()])
    assert not any(torch.equal(row, old) for row, old in zip(rows, trained.values(), strict=False))
    spread = AutoConfig.from_pretrained(folder).initializer_range
    assert torch.all(rows[:, -1] == 0) and 0.8 * spread < float(rows[:, :-1].std()) < 1.2 * spread
    torch.manual_seed(7)
    assert torch.equal(torch.stack([*taken_over(folder)[0].values()]), rows)


def test_numbered_classes_are_those_of_an_unnamed_head(classifier):
    folder, trained = classifier("LABEL_0", "LABEL_1", "LABEL_2")
    found, notes = taken_over(folder, DataSpec(modality="text", labels=("1", "0", "2")))
    assert "follow their names" in notes
    assert all(torch.equal(found[str(n)], trained[f"LABEL_{n}"]) for n in range(3))


@pytest.mark.parametrize("names", [("LABEL_0", "LABEL_1", "LABEL_2"), ("LABEL_2", "LABEL_0", "LABEL_1")])
def test_classes_may_have_the_names_of_an_unnamed_head(classifier, names):
    folder, trained = classifier("LABEL_0", "LABEL_1", "LABEL_2")
    found, _ = taken_over(folder, DataSpec(modality="text", labels=names))
    assert all(torch.equal(found[name], trained[name]) for name in names)


def test_the_one_number_of_a_regression_is_taken_over(classifier):
    folder, trained = classifier("LABEL_0")
    found, notes = taken_over(folder, DataSpec(modality="text", numbers=("stars",)))
    assert "one unnamed output, which is taken over for 'stars'" in notes
    assert torch.equal(found["stars"], trained["LABEL_0"])


def test_each_strategy_begins_with_the_same_rows(classifier, tmp_path):
    folder, _ = classifier("so so", "bad", "good")
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"text {n},{OURS.labels[n % 3]}\n" for n in range(30)))
    words = ["data.kind=files", "data.train=rows.csv", "data.test=rows.csv", "model.kind=transformer"]
    words += [f"model.name={folder}", "model.max_length=16", "train.steps=2", "train.global_batch=8"]
    (tmp_path / "c.yaml").write_text("train: {micro_batch: 4}\n")
    for kind, processes in (("single", 1), ("fsdp", 2), ("pipeline", 2)):
        own = [f"run.name={kind}", f"parallel.kind={kind}", f"launch.processes={processes}"]
        done = lockstep(tmp_path, "train", "c.yaml", *words, *own)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len({summary(tmp_path, kind)["digest"] for kind in ("single", "fsdp", "pipeline")}) == 1
