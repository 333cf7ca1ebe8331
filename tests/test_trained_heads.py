"""Training goes on from a classifier: the rows of its head belong to the names of its classes, or it is told."""

import pytest
import torch
from exporting import text_case
from running import lockstep, summary
from transformers import AutoModelForSequenceClassification, AutoTokenizer

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


def taken_over(folder):
    model = transformer.build(transformer.Config(kind="transformer", name=str(folder), max_length=16), OURS)
    assert list(model.network.config.id2label.values()) == list(OURS.labels)
    return dict(zip(OURS.labels, rows_of(model.network), strict=True)), " ".join(model._lockstep_notes)


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
            "a head for 3 classes, unnamed: it is taken over, its first output for 'bad'",
        ),
        (("sad", "glad", "calm"), "a head for 3 classes, sad, glad, calm: it is taken over"),
        (("bad", "good"), ""),
    ],
)
def test_other_names_are_told(classifier, names, said):
    """A head of another size is new, as that of an encoder is."""
    folder, trained = classifier(*names)
    found, notes = taken_over(folder)
    assert said in notes
    assert torch.equal(torch.stack([*found.values()]), torch.stack([*trained.values()])) == bool(said)


def test_each_strategy_begins_with_the_same_rows(classifier, tmp_path):
    folder, _ = classifier("so so", "bad", "good")
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"text {n},{OURS.labels[n % 3]}\n" for n in range(30)))
    words = ["data.kind=files", "data.train=rows.csv", "data.test=rows.csv", "model.kind=transformer"]
    words += [f"model.name={folder}", "model.max_length=16", "train.steps=2", "train.global_batch=8"]
    (tmp_path / "c.yaml").write_text("train: {micro_batch: 4}\n")
    for kind, processes in (("single", 1), ("ddp", 2), ("fsdp", 2), ("pipeline", 2)):
        own = [f"run.name={kind}", f"parallel.kind={kind}", f"launch.processes={processes}"]
        done = lockstep(tmp_path, "train", "c.yaml", *words, *own)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len({summary(tmp_path, kind)["digest"] for kind in ("single", "ddp", "fsdp", "pipeline")}) == 1
