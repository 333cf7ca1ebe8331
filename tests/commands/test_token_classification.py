"""A class for each word, on its whole way: trained on any number of processes, killed, evaluated, exported, predicted.

The data are made up by `write_sentences`: words of syllables, of which those that begin with b belong to the name of a
person, and those with d to that of a place.
"""

import csv
import json
import os

import numpy as np
import pytest
from objective_runs import SETTINGS, VARIANTS, brief_runs, wait_for_checkpoint
from running import lockstep, started, summary, workers
from served import serving
from sklearn.metrics import accuracy_score, f1_score

from lockstep.base.contracts import DataSpec
from lockstep.models import _transformer as transformer

SYLLABLES = [first + vowel for first in "bdfgklmnprst" for vowel in "aeiou"]
LABELS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
LONGEST = 24
"""Tokens that the model reads: some sentences are longer."""


def sentence(generator):
    """Words of one to three syllables, and their tags."""
    words, tags = [], []
    for _ in range(generator.integers(2, 8)):
        kind = ("O", "O", "PER", "LOC")[generator.integers(4)]
        firsts = [each for each in SYLLABLES if {"b": "PER", "d": "LOC"}.get(each[0], "O") == kind]
        for number in range(generator.integers(1, 3)):
            words.append("".join([generator.choice(firsts), *generator.choice(SYLLABLES, generator.integers(0, 3))]))
            tags.append("O" if kind == "O" else f"{'I' if number else 'B'}-{kind}")
    return words, tags


def write_sentences(file, count, seed):
    generator = np.random.default_rng(seed)
    rows = [dict(zip(("words", "tags"), sentence(generator), strict=True)) for _ in range(count)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small encoder with random weights, a tokenizer that splits words into syllables, and tables."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import DistilBertConfig, DistilBertForTokenClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tags")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *SYLLABLES, *(f"##{each}" for each in SYLLABLES)]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "small")
    sizes = {"vocab_size": len(pieces), "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
    config = DistilBertConfig(**sizes, max_position_embeddings=64, pad_token_id=0)
    DistilBertForTokenClassification(config).save_pretrained(folder / "small")
    write_sentences(folder / "train.jsonl", 300, seed=0)
    write_sentences(folder / "test.jsonl", 90, seed=1)
    data = {"kind": "files", "train": "train.jsonl", "test": "test.jsonl", "labels": "tags"}
    config = {
        "data": {**data, "text_column": "words", "label_column": "tags"},
        "model": {"kind": "transformer", "name": str(folder / "small"), "max_length": LONGEST},
        "checkpoint": {"best": "entity_f1"},
        "optim": {"lr": 0.01},
    }
    (folder / "tags.yaml").write_text(json.dumps(config))
    return folder


SETTINGS = [setting for setting in SETTINGS if not setting.startswith("optim.lr")]


@pytest.fixture(scope="module")
def trained(folder):
    """What one process says of its run."""
    done = lockstep(folder, "train", "tags.yaml", *SETTINGS, *VARIANTS["one"], "run.name=one")
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(folder, "one")


@pytest.mark.timeout(200)
def test_the_same_bits_and_metrics_on_any_cluster(ranks, folder, trained):
    assert set(trained["evaluation"]) == {"loss", "accuracy", "f1", "entity_f1"}
    assert trained["evaluation"]["entity_f1"] > 0.3  # it has learned something
    found = brief_runs(ranks, folder / "tags.yaml", SETTINGS)
    for variant, each in found.items():
        for name in ("digest", "evaluation"):
            assert each[name] == found["one"][name], (variant, name)


@pytest.mark.matrix
def test_killed_and_resumed_on_another_number_of_processes(folder, trained):
    command = ["train", "tags.yaml", *SETTINGS, "run.name=killed", "launch.max_restarts=0"]
    process = started(folder, *command, "launch.processes=2")
    wait_for_checkpoint(folder / "runs" / "killed" / "checkpoints" / "step-000000020")
    workers(process)[1].kill()
    process.communicate(timeout=60)
    again = lockstep(folder, *command, "launch.processes=1")
    assert again.returncode == 0 and "resumed after step" in again.stdout, again.stdout + again.stderr
    found = summary(folder, "killed")
    assert (found["digest"], found["evaluation"]) == (trained["digest"], trained["evaluation"])


@pytest.fixture(scope="module")
def exported(folder, trained):
    done = lockstep(folder, "export", "runs/one", "--to", "export")
    assert done.returncode == 0 and "the same weights bit for bit" in done.stdout, done.stdout + done.stderr
    return folder / "export"


@pytest.fixture(scope="module")
def measured(folder, exported):
    """What `evaluate` says of run and export."""
    found = []
    for where in ("runs/one", "export"):
        done = lockstep(folder, "evaluate", where, "--to", "evaluation", "launch.processes=2")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads((folder / "evaluation" / "evaluation.json").read_text()))
    return found


@pytest.fixture(scope="module")
def predicted(folder, exported):
    """The test sentences with the tags of `predict`."""
    done = lockstep(folder, "predict", "export", "test.jsonl", "--out", "said.jsonl", "--prefix", "said_")
    assert done.returncode == 0, done.stdout + done.stderr
    return read(folder / "said.jsonl")


def test_run_and_export_are_measured_the_same(folder, trained, measured):
    run, export = measured
    assert run["metrics"] == pytest.approx(export["metrics"], rel=1e-6)
    assert run["metrics"] == pytest.approx(trained["best"]["evaluation"], rel=1e-6)
    assert [each["label"] for each in run["classes"]] == list(LABELS)
    assert sum(map(sum, run["confusion_matrix"])) == sum(each["support"] for each in run["classes"])
    worst, rows = run["worst"], read(folder / "test.jsonl")
    assert worst[0]["loss"] >= worst[-1]["loss"] > 0 and worst[0]["origin"].startswith("sample ")
    row = rows[worst[0]["index"]]
    assert worst[0]["text"] == " ".join(row["words"])
    tags = worst[0]["label"].split()
    assert tags == row["tags"][: len(tags)] and len(worst[0]["predicted"].split()) == len(tags)


def entities(tags):
    """(kind, first word, words) of each: a tag at a time."""
    found, now = [], None
    for number, tag in enumerate([*tags, "O"]):
        goes_on = now is not None and tag == f"I-{now[0]}"
        if now is not None and not goes_on:
            found.append((*now, number - now[1]))
            now = None
        if tag not in ("O", "_") and not goes_on:
            now = (tag[2:], number)
    return set(found)


def test_metrics_are_those_of_scikit_learn_on_the_predictions(predicted, measured):
    """Words that the model does not reach are said to have no tag, and are not measured."""
    said = [row["said_tags"] for row in predicted]
    assert all(len(tags) == len(row["tags"]) for tags, row in zip(said, predicted, strict=True))
    assert any("_" in tags for tags in said)
    reached = [[tag != "_" for tag in tags] for tags in said]
    true = [[*np.array(row["tags"])[mask]] for row, mask in zip(predicted, reached, strict=True)]
    said = [[*np.array(tags)[mask]] for tags, mask in zip(said, reached, strict=True)]
    flat_true, flat_said = sum(true, []), sum(said, [])
    found, there, answered = (
        sum(len(each) for each in sets)
        for sets in (
            [entities(a) & entities(b) for a, b in zip(true, said, strict=True)],
            map(entities, true),
            map(entities, said),
        )
    )
    expected = {
        "accuracy": accuracy_score(flat_true, flat_said),
        "f1": f1_score(flat_true, flat_said, average="macro"),
        "entity_f1": 2 * found / (there + answered),
    }
    assert {name: measured[0]["metrics"][name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_entities_are_those_of_a_count_by_hand():
    """Random tags, also I- without a B-, which begins an entity; several texts in a batch, and ignored tokens."""
    import torch

    from lockstep.models.objectives._token_classification import entity_f1

    generator, labels = torch.Generator().manual_seed(0), ("O", "B-A", "I-A", "B-B", "I-B")
    metric = entity_f1(labels)
    logits = torch.rand(200, 5, 9, generator=generator)
    true = torch.randint(5, (200, 9), generator=generator)
    true[torch.rand(200, 9, generator=generator) < 0.3] = -100
    counts = np.zeros(3, dtype=int)
    for guess, row in zip(logits.argmax(1), true, strict=True):
        mask = row != -100
        a, b = (entities([labels[number] for number in each[mask]]) for each in (guess, row))
        counts += [len(a & b), len(a), len(b)]
    assert metric.statistics(logits.argmax(1), true).tolist() == counts.tolist()
    assert counts[0] > 20
    assert float(metric.compute(torch.tensor(counts))) == pytest.approx(2 * counts[0] / (counts[1] + counts[2]))
    assert entity_f1(("DET", "NOUN")) is None and entity_f1(("O",)) is None


def test_served(folder, exported, predicted):
    """Answers are those of the table, also for texts of different lengths together."""
    rows = predicted[:12]
    with serving(exported) as server:
        texts = [" ".join(row["words"]) for row in rows]
        answers = server.post("/predict/batch", json={"texts": texts}).json()["predictions"]
        one = server.post(json={"text": texts[0]}).json()
        schema = server.get("/openapi.json").json()["components"]["schemas"]["Answer"]["properties"]
        page = server.get("/").text
    for row, answer in zip(rows, answers, strict=True):
        assert [each["word"] for each in answer["tokens"]] == row["words"]
        assert [each["label"] or "_" for each in answer["tokens"]] == row["said_tags"]
        assert all((each["confidence"] is None) == (each["label"] is None) for each in answer["tokens"])
    assert any(each["label"] is None for answer in answers for each in answer["tokens"])
    assert (
        set(one) == set(schema) == {"tokens", "model"} and one["tokens"][0]["label"] == answers[0]["tokens"][0]["label"]
    )
    assert "answer.tokens" in page


def test_transformers_predicts_the_same(exported, predicted, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which transformers would set
    from transformers import pipeline

    tag = pipeline("token-classification", str(exported), ignore_labels=[])
    for row in [each for each in predicted if "_" not in each["said_tags"]][:20]:  # it reads longer texts as a whole
        text = " ".join(row["words"])
        starts = np.cumsum([0, *(len(word) + 1 for word in row["words"])])
        theirs = {each["start"]: each["entity"] for each in tag(text)}
        said = row["said_tags"]
        assert [theirs[start] for start in starts[:-1]] == said


def test_the_card_says_what_it_predicts(exported):
    card = (exported / "README.md").read_text()
    assert 'that gives each word of texts one of 5 labels: "B-LOC", "B-PER"' in card
    assert "pipeline_tag: token-classification" in card and 'pipeline("token-classification", ' in card


def test_other_tables_are_evaluated_and_predicted(folder, exported):
    """Texts with spaces, in CSV; a class that the model does not know is named with its row."""
    rows = read(folder / "test.jsonl")[:9]
    with (folder / "spaces.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerows([["words", "tags"], *([" ".join(row[name]) for name in ("words", "tags")] for row in rows)])
    (folder / "lists.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = []
    for name in ("spaces.csv", "lists.jsonl"):
        done = lockstep(folder, "evaluate", "export", "--file", name, "--to", "other")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads((folder / "other" / "evaluation.json").read_text()))
    assert found[0]["metrics"] == found[1]["metrics"]
    assert found[0]["worst"][0]["origin"].startswith("row ")
    (folder / "strange.jsonl").write_text('{"words": ["ba", "be"], "tags": ["O", "B-ORG"]}\n')
    done = lockstep(folder, "evaluate", "export", "--file", "strange.jsonl", "--to", "other")
    said = " ".join((done.stdout + done.stderr).split())
    assert "row 1 of" in said and "has the label 'B-ORG', which the model does not know" in said, said


@pytest.mark.parametrize(
    "row, message",
    [
        ({"words": ["ba", "be"], "tags": ["O"]}, "row 1 of {} has 2 words and 1 labels: give one label for each word"),
        (
            {"words": ["ba", ""], "tags": ["O", "O"]},
            "row 1 of {} has '' for a word: a word is a text that is not empty",
        ),
        ({"words": ["ba", 3], "tags": ["O", "O"]}, "row 1 of {} has 3 for a word"),
        ({"words": ["b\x1fa"], "tags": ["O"]}, "for a word: a word is a text"),
        ({"words": [], "tags": []}, "row 1 of {} has no word: remove the row"),
        ({"words": {"a": 1}, "tags": ["O"]}, "row 1 of {} has {{'a': 1}} for words: data.labels=tags takes a list"),
        ({"words": ["ba"], "tags": 3}, "row 1 of {} has 3 for labels: data.labels=tags takes a list"),
        ({"words": ["ba"], "tags": [None]}, "row 1 of {} has no label: label it or remove it"),
    ],
)
def test_wrong_rows_are_named(tmp_path, row, message):
    from lockstep.base.errors import DataError
    from lockstep.data.sources import _files as files
    from lockstep.data.targets import COLUMNS

    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError) as caught:
        files.read(path, ("words", "tags"), COLUMNS["tags"])
    assert message.format(path) in str(caught.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        (["data.train=wrong.jsonl"], "row 2 of"),
        (
            ["model.objective=classification", "checkpoint.best=f1"],
            "model.objective=classification does not fit this data",
        ),
        (["data.labels=class", "checkpoint.best=f1"], "row 1 of"),
    ],
)
def test_what_does_not_fit_is_said_in_one_message(folder, settings, message):
    rows = [{"words": ["ba"], "tags": ["O"]}, {"words": ["ba", "be"], "tags": ["O"]}]
    (folder / "wrong.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = lockstep(folder, "train", "tags.yaml", *SETTINGS, *settings, "run.name=wrong")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and message in said and "Traceback" not in said, said


def test_tags_of_a_data_set_of_the_hub(folder, tmp_path):
    """Numbers of named classes in a local Parquet file."""
    datasets = pytest.importorskip("datasets")
    from lockstep.data.sources import _hub as hub
    from lockstep.data.sources.hub import Config

    rows = read(folder / "test.jsonl")
    tags = datasets.Sequence(datasets.ClassLabel(names=list(LABELS)))
    features = datasets.Features({"words": datasets.Sequence(datasets.Value("string")), "tags": tags})
    numbers = [[LABELS.index(tag) for tag in row["tags"]] for row in rows]
    table = datasets.Dataset.from_dict({"words": [row["words"] for row in rows], "tags": numbers}, features=features)
    table.to_parquet(tmp_path / "train.parquet")
    table.to_parquet(tmp_path / "test.parquet")
    config = Config(kind="hub", name=str(tmp_path), text_column="words", label_column="tags", labels="tags")
    source = hub.build(config, "test")
    assert source.spec.labels == LABELS and source.spec.objective == "token_classification"
    assert source.spec.pad == {"label": -100}
    assert [source[0] for source in (source.__getitems__([3])["label"],)][0].tolist() == numbers[3]


def test_words_without_tokens_keep_their_place(folder):
    """Of a tokenizer that removes control characters: the word after one still begins at its own token."""
    from tokenizers import Regex, Tokenizer, normalizers

    file = folder / "small" / "tokenizer.json"
    strange = folder / "strange"
    strange.mkdir()
    for each in (folder / "small").iterdir():
        os.link(each, strange / each.name)
    made = Tokenizer.from_file(str(file))
    made.normalizer = normalizers.Replace(Regex("\u200b"), "")
    (strange / file.name).unlink()
    made.save(str(strange / file.name))
    spec = DataSpec(modality="text", labels=LABELS, objective="token_classification")
    config = transformer.Config(kind="transformer", name=str(strange), max_length=6)
    tokenizer = transformer.tokenizer(config, spec)
    texts = ["ba \u200b bebi", "", "babebi bo bu", "ba be bi bo bu"]
    rows = tokenizer(texts)
    assert [(row >= 0).sum() for row in rows] == [3, 0, 2, 4]
    names = tokenizer.tokenizer.convert_ids_to_tokens([*np.where(rows[0] < 0, ~rows[0], rows[0])])
    assert names == ["[CLS]", "ba", "[UNK]", "be", "##bi", "[SEP]"]
    assert tokenizer.key != transformer.tokenizer(config).key


MODEL = '''
import numpy as np
from torch import nn

from lockstep import DataSpec


class Digits:
    """Rows of numbers below 10 of different lengths; each is tagged by whether the one before it is larger."""

    lengths = None

    def __init__(self, split):
        self.spec = DataSpec(modality="rows", labels=("no", "yes"), objective="token_classification")
        self.seed = {"train": 0, "test": 1}[split]

    def __len__(self):
        return 200 if self.seed == 0 else 50

    def __getitems__(self, indices):
        rows = [np.random.default_rng([self.seed, i]) for i in indices]
        rows = [each.integers(0, 10, each.integers(1, 12)) for each in rows]
        labels = [np.diff(row, prepend=row[:1]) < 0 for row in rows]
        return {"row": rows, "label": [label.astype(np.int64) for label in labels]}


def source(options, split):
    return Digits(split)


class Network(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.layer = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, len(spec.labels))

    def forward(self, batch):
        hidden = self.embedding(batch["row"]).transpose(1, 2)
        return self.head(self.layer(hidden).relu().transpose(1, 2))


def build(options, spec):
    return Network(spec)
'''


def test_a_users_model_and_source(tmp_path):
    """Padding has no class: the confusion matrix counts what there is, whatever the size of a micro-batch."""
    (tmp_path / "rows.py").write_text(MODEL)
    (tmp_path / "c.yaml").write_text(
        "data: {kind: user, file: rows.py}\nmodel: {kind: user, file: rows.py}\noptim: {lr: 0.01}\n"
        "train: {epochs: 8, global_batch: 20, micro_batch: 5, stop_metric: f1}\n"
        "evaluate: {every_epochs: 4}\n"
    )
    found = []
    for world in (1, 2):
        done = lockstep(tmp_path, "train", "c.yaml", f"launch.processes={world}", f"run.name=w{world}")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(summary(tmp_path, f"w{world}"))
    assert found[0]["digest"] == found[1]["digest"] and found[0]["evaluation"] == found[1]["evaluation"]
    assert set(found[0]["evaluation"]) == {"loss", "accuracy", "f1"} and found[0]["evaluation"]["accuracy"] > 0.8
    done = lockstep(tmp_path, "evaluate", "runs/w1")
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "runs" / "w1" / "evaluation.json").read_text())
    lengths = [np.random.default_rng([1, i]) for i in range(50)]
    rows = sum(len(each.integers(0, 10, each.integers(1, 12))) for each in lengths)
    assert sum(map(sum, measured["confusion_matrix"])) == rows
    assert lockstep(tmp_path, "export", "runs/w1", "--to", "export").returncode == 0
