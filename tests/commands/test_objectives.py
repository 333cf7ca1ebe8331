"""Each objective on its whole way: trained on any number of processes, killed, evaluated, exported, predicted, served."""

import csv
import json

import numpy as np
import pytest
from members import further
from objective_runs import SETTINGS, VARIANTS, brief_runs, wait_for_checkpoint
from running import lockstep, started, summary, workers
from served import serving
from sklearn.datasets import load_diabetes
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, r2_score, root_mean_squared_error

TOPICS = ("deep", "high", "low")
OBJECTIVES = {
    "regression": ("stars", ["data.labels=number", "checkpoint.best=rmse"], {"loss", "mae", "rmse", "r2"}),
    "multilabel": ("topics", ["data.labels=classes"], {"loss", "exact_match", "f1", "f1_micro"}),
    "classification": ("kind", [], {"loss", "accuracy", "f1"}),
}
"""Label column, settings, and names of the metrics."""


def write_texts(file, count, seed):
    """Texts of random words, with a number, any number of classes, and one class, which follow from the words."""
    generator = np.random.default_rng(seed)
    with file.open("w") as open_file:
        writer = csv.writer(open_file)
        writer.writerow(["text", "stars", "topics", "kind"])
        for _ in range(count):
            words = generator.integers(0, 60, 10)
            present = generator.random(3) < 0.5
            for number in np.flatnonzero(present):
                words[3 * number : 3 * number + 3] = number  # its own word, three times
            topics = ";".join(name for name, is_there in zip(TOPICS, present, strict=True) if is_there)
            writer.writerow(
                [" ".join(f"w{word}" for word in words), (words < 30).sum() / 2 - 2.5, topics, str(present[0])]
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small encoder with random weights, its tokenizer, and tables."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("objectives")
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = folder / "small"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(model)
    sizes = {"vocab_size": len(words), "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
    DistilBertForSequenceClassification(
        DistilBertConfig(**sizes, max_position_embeddings=32, pad_token_id=0)
    ).save_pretrained(model)
    write_texts(folder / "train.csv", 300, seed=0)
    write_texts(folder / "test.csv", 90, seed=1)
    for name, (column, settings, _) in OBJECTIVES.items():
        config = {
            "data": {"kind": "files", "train": "train.csv", "test": "test.csv", "label_column": column},
            "model": {"kind": "transformer", "name": str(model), "max_length": 32},
        }
        for setting in settings:
            key, _, value = setting.partition("=")
            section, _, inner = key.partition(".")
            config.setdefault(section, {})[inner] = value
        (folder / f"{name}.yaml").write_text(json.dumps(config))
    return folder


@pytest.fixture(
    scope="module",
    params=["regression", "multilabel", pytest.param("classification", marks=pytest.mark.matrix)],
)
def objective(folder, request):
    """One that is trained on one process."""
    train(folder, request.param)
    return request.param


def train(folder, name):
    done = lockstep(folder, "train", f"{name}.yaml", *SETTINGS, *VARIANTS["one"], f"run.name={name}-one")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize("objective", ["regression", *further("multilabel", "classification")], indirect=True)
def test_the_same_bits_and_metrics_on_any_cluster(ranks, folder, objective):
    found = brief_runs(ranks, folder / f"{objective}.yaml")
    assert set(found["one"]["evaluation"]) == OBJECTIVES[objective][2]
    for variant, each in found.items():
        for name in ("digest", "evaluation"):
            assert each[name] == found["one"][name], (variant, name)


@pytest.mark.parametrize("objective", ["regression", *further("multilabel", "classification")], indirect=True)
def test_killed_and_resumed_on_another_number_of_processes(folder, objective):
    command = ["train", f"{objective}.yaml", *SETTINGS, "run.name=" + objective + "-killed", "launch.max_restarts=0"]
    process = started(folder, *command, "launch.processes=2")
    wait_for_checkpoint(folder / "runs" / f"{objective}-killed" / "checkpoints" / "step-000000020")
    workers(process)[1].kill()
    process.communicate(timeout=60)
    again = lockstep(folder, *command, "launch.processes=1")
    assert again.returncode == 0 and "resumed after step" in again.stdout, again.stdout + again.stderr
    found, expected = summary(folder, f"{objective}-killed"), summary(folder, f"{objective}-one")
    assert (found["digest"], found["evaluation"]) == (expected["digest"], expected["evaluation"])


@pytest.fixture(scope="module")
def exported(folder, objective):
    """Its export, and what `evaluate` says of run and export."""
    target, found = folder / f"{objective}-export", {}
    done = lockstep(folder, "export", f"runs/{objective}-one", "--to", target.name)
    assert done.returncode == 0 and "the same weights bit for bit" in done.stdout, done.stdout + done.stderr
    for where in (f"runs/{objective}-one", target.name):
        done = lockstep(folder, "evaluate", where, "--to", f"{objective}-evaluation")
        assert done.returncode == 0, done.stdout + done.stderr
        found[where] = json.loads((folder / f"{objective}-evaluation" / "evaluation.json").read_text())
    return target, found


def test_run_and_export_are_measured_the_same(folder, objective, exported):
    run, export = exported[1].values()
    assert run["metrics"] == pytest.approx(export["metrics"], rel=1e-6)
    assert run["worst"][0]["loss"] >= run["worst"][-1]["loss"] > 0
    assert [each["label"] for each in run.get("classes", [])] == list(
        {"regression": (), "multilabel": TOPICS, "classification": ("False", "True")}[objective]
    )
    page = (folder / f"{objective}-evaluation" / "evaluation.html").read_text()
    assert page.count("<li>") == len(run["worst"]) == 20
    assert ("Calibration" in page) == (objective == "classification")


def test_metrics_are_those_of_scikit_learn_on_the_predictions(folder, objective, exported):
    """The predictions of `predict`, in a table."""
    export, measured = exported[0], [*exported[1].values()][0]["metrics"]
    done = lockstep(folder, "predict", export.name, "test.csv", "--out", f"{objective}.csv", "--prefix", "said_")
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / f"{objective}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 90
    if objective == "multilabel":  # a list where the form has lists
        listed = f"{objective}.jsonl"
        assert lockstep(folder, "predict", export.name, "test.csv", "--out", listed).returncode == 0
        lists = [json.loads(line)["labels"] for line in (folder / listed).read_text().splitlines()]
        assert [";".join(labels) for labels in lists] == [row["said_labels"] for row in rows]
    if objective == "regression":
        true, said = (np.array([float(row[name]) for row in rows]) for name in ("stars", "said_stars"))
        expected = {
            "mae": mean_absolute_error(true, said),
            "rmse": root_mean_squared_error(true, said),
            "r2": r2_score(true, said),
        }
    elif objective == "multilabel":
        true, said = (
            np.array([[topic in row[name].split(";") for topic in TOPICS] for row in rows])
            for name in ("topics", "said_labels")
        )
        expected = {
            "exact_match": accuracy_score(true, said),
            "f1": f1_score(true, said, average="macro", zero_division=0),
            "f1_micro": f1_score(true, said, average="micro"),
        }
    else:
        true, said = ([row[name] for row in rows] for name in ("kind", "said_label"))
        expected = {"accuracy": accuracy_score(true, said), "f1": f1_score(true, said, average="macro")}
    assert {name: measured[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert len(set(map(str, said))) > 1  # it tells samples apart: a constant would hide mistakes


@pytest.fixture(scope="module")
def server(exported):
    with serving(exported[0]) as server:
        yield server


def test_served(objective, server, folder):
    """An answer is that of the table, and its schema says what it holds."""
    with (folder / "test.csv").open() as file:
        text = next(csv.DictReader(file))["text"]
    answer = server.post(json={"text": text}).json()
    batch = server.post("/predict/batch", json={"texts": [text, text]}).json()
    schema = server.get("/openapi.json").json()["components"]["schemas"]["Answer"]["properties"]
    one, again = (each.get("values") or each["probabilities"] for each in (answer, batch["predictions"][1]))
    assert again == pytest.approx(one, abs=1e-6)
    assert set(answer) == set(schema)
    names = {"regression": ["values"], "multilabel": ["labels", "probabilities"]}
    assert set(answer) - {"model"} == set(names.get(objective, ["label", "confidence", "probabilities"]))


def test_the_card_says_what_it_predicts(objective, exported):
    card = (exported[0] / "README.md").read_text()
    says = {
        "regression": 'that predicts numbers from texts: "stars"',
        "multilabel": 'that says which of 3 labels fit texts: "deep", "high", "low"',
        "classification": 'that tells 2 classes of texts apart: "False", "True"',
    }
    assert says[objective] in card


def test_transformers_predicts_the_same(folder, exported, server, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which transformers would set
    from transformers import pipeline

    with (folder / "test.csv").open() as file:
        text = next(csv.DictReader(file))["text"]
    classify = pipeline("text-classification", str(exported[0]), top_k=None)
    theirs = {each["label"]: each["score"] for each in classify([text])[0]}
    ours = server.post(json={"text": text}).json()
    assert (ours.get("values") or ours["probabilities"]) == pytest.approx(theirs, abs=1e-5)


MODEL = '''
import numpy as np
from sklearn.datasets import load_diabetes
from torch import nn

from lockstep import DataSpec


class Patients:
    """Ten measured values of a patient, and how far the disease has gone a year later."""

    spec, lengths = DataSpec(modality="measurements", numbers=("progression",)), None

    def __init__(self, split):
        rows = [row for row in range(442) if (row % 5 == 0) == (split == "test")]
        self.values, self.targets = (each[rows].astype(np.float32) for each in load_diabetes(return_X_y=True))

    def __len__(self):
        return len(self.targets)

    def __getitems__(self, indices):
        return {"values": self.values[indices], "label": self.targets[indices] / 100}


def source(options, split):
    return Patients(split)


class Network(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, len(spec.numbers)))

    def forward(self, batch):
        return self.layers(batch["values"])


def build(options, spec):
    return Network(spec)
'''


def test_a_users_regression_needs_neither_loss_nor_labels(tmp_path, monkeypatch):
    """scikit-learn's diabetes: metrics are those of scikit-learn on the model's outputs."""
    (tmp_path / "patients.py").write_text(MODEL)
    (tmp_path / "c.yaml").write_text(
        "data: {kind: user, file: patients.py}\nmodel: {kind: user, file: patients.py}\noptim: {lr: 0.03}\n"
        "train: {epochs: 10, global_batch: 32, micro_batch: 8, stop_metric: r2}\n"
        "evaluate: {every_epochs: 5}\n"
    )
    found = []
    for world in (1, 2):
        done = lockstep(tmp_path, "train", "c.yaml", f"launch.processes={world}", f"run.name=w{world}")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(summary(tmp_path, f"w{world}"))
    assert found[0]["digest"] == found[1]["digest"] and found[0]["evaluation"] == found[1]["evaluation"]
    assert set(found[0]["evaluation"]) == {"loss", "mae", "rmse", "r2"}
    assert lockstep(tmp_path, "export", "runs/w1", "--to", "export").returncode == 0
    import torch

    from lockstep.base import trust
    from lockstep.inference.export.export_reader import forward_of

    monkeypatch.setattr(trust._state, "allows_all", True)  # for this test alone

    values, target = load_diabetes(return_X_y=True)
    inputs = torch.from_numpy(values[::5].astype(np.float32))
    with torch.no_grad():
        said = forward_of(tmp_path / "export")({"values": inputs}).flatten().numpy()
    measured = found[0]["evaluation"]
    true = target[::5].astype(np.float32) / 100
    assert measured["mae"] == pytest.approx(mean_absolute_error(true, said), rel=1e-5)
    assert measured["rmse"] == pytest.approx(root_mean_squared_error(true, said), rel=1e-5)
    assert measured["r2"] == pytest.approx(r2_score(true, said), rel=1e-5)
    assert measured["r2"] > 0.3


STOPPED = (
    MODEL
    + '''

def metrics(spec):
    """With float states, which would depend on the order of their sums."""
    from torchmetrics.regression import MeanAbsolutePercentageError, R2Score

    def pair(outputs, batch):
        return outputs[:, 0], batch["label"]

    return {"mape_error": (MeanAbsolutePercentageError(), pair), "r2": (R2Score(), pair)}
'''
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("worlds", [(1, 3), pytest.param((1, 2, 5), marks=pytest.mark.matrix)])
def test_early_stopping_by_a_users_metric_ends_at_the_same_step_everywhere(tmp_path, worlds):
    (tmp_path / "patients.py").write_text(STOPPED)
    (tmp_path / "c.yaml").write_text(
        "data: {kind: user, file: patients.py}\nmodel: {kind: user, file: patients.py}\noptim: {lr: 0.05}\n"
        "train: {epochs: 60, global_batch: 40, micro_batch: 8, stop_metric: mape_error, stop_patience: 2}\n"
        "checkpoint: {best: r2, keep: 1}\nobserve: {sinks: [jsonl]}\n"
    )
    found = []
    for world in worlds:
        done = lockstep(tmp_path, "train", "c.yaml", f"launch.processes={world}", f"run.name=w{world}")
        assert done.returncode == 0, done.stdout + done.stderr
        run, told = tmp_path / "runs" / f"w{world}", summary(tmp_path, f"w{world}")
        kept = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
        measured = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "r2" in line]
        found.append((told["steps"], told["status"], told["digest"], kept, measured))
    assert all(each == found[0] for each in found)
    steps, status, _, kept, measured = found[0]
    assert status == "stopped early" and 40 < steps < 60 * 9 and len(kept) == 2
    best = max(measured, key=lambda line: line["r2"])["step"]
    assert f"step-{best:09}" == kept[0]


@pytest.mark.parametrize(
    "settings, message",
    [
        (["data.labels=number"], "which is no finite number: correct it, remove the row, or set data.labels=class"),
        (["model.objective=regresion"], "there is no objective 'regresion' — did you mean 'regression'?"),
        (["model.objective=regression"], "model.objective=regression needs numbers to predict, with names"),
        (["model.objective=causal_lm"], "model.objective=causal_lm needs tokens to predict"),
        (["checkpoint.best=rmse"], "there is no metric 'rmse'"),
        (["data.labels=numbers"], "data.labels"),
    ],
)
def test_what_does_not_fit_is_said_in_one_message(folder, settings, message):
    done = lockstep(folder, "train", "classification.yaml", *SETTINGS, *settings, "run.name=wrong")
    assert done.returncode != 0
    assert message in " ".join((done.stdout + done.stderr).split()), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
