"""`lockstep evaluate`: the same figures on any number of processes, of a run and of its exports, and the messages."""

import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # transformers and the exporters import it, which sets a variable: better here than inside a test
import torch.distributed as dist
import warm
from filelock import FileLock
from PIL import Image
from rich.console import Console
from sklearn.metrics import classification_report, confusion_matrix, f1_score, log_loss

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, DataError, ModelError
from lockstep.base.events import RunStarted
from lockstep.base.world import World
from lockstep.core.host.signals import SignalWatch
from lockstep.data.in_memory import Texts
from lockstep.data.sources import _digits as digits
from lockstep.inference import trained_model
from lockstep.inference.evaluate import evaluate_model, evaluation_report
from lockstep.inference.evaluate.calibration import ece, fitted, half
from lockstep.inference.evaluate.evaluation_samples import of_file
from lockstep.inference.export import export_facts
from lockstep.models import _transformer as transformer
from lockstep.observe.sinks import tensorboard
from lockstep.recipe.recipe import Recipe
from lockstep.run.tasks.evaluate import EvaluateTask
from lockstep.run.tasks.train import TrainTask
from lockstep.training.evaluation import Predictions

KINDS = ["pretrained", "safetensors", "state_dict", "onnx", "torch_export"]
MODEL = """
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassCalibrationError

from lockstep import LossSum


class Sure(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, batch):
        return 6 * self.layers(batch["image"] / 255)


def build(options, spec):
    return Sure()


def loss(outputs, batch):
    return LossSum(F.cross_entropy(outputs, batch["label"], reduction="sum", label_smoothing=0.1), len(outputs))


def metrics(spec):
    return {"own": MulticlassCalibrationError(len(spec.labels), n_bins=7)}
"""


def world():
    return World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=dist.get_rank())


def train_there(recipe):
    job = TrainTask(recipe, world(), SignalWatch())
    job.run("never", allow_drift=False)
    job.close()


def measure_there(recipe, task):
    job = EvaluateTask(recipe, world(), SignalWatch(), request=task)
    job.run("never", allow_drift=False)
    job.close()


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """A run of a user's own model with its own loss and a metric that adds floats up."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "sure.py").write_text(MODEL)
    recipe = Recipe.model_validate(
        {
            "run": {"dir": folder, "name": "r"},
            "data": {"kind": "digits", "limit": 320},
            "model": {"kind": "user", "file": folder / "sure.py"},
            "train": {"steps": 12},
            "optim": {"lr": 0.004},
            "observe": {"sinks": ["jsonl"]},
        }
    )
    ranks(1, train_there, recipe)
    return folder / "r"


@pytest.fixture
def evaluate(ranks, monkeypatch, tmp_path):
    """The command, with warm processes in place of those that its launcher would start -> evaluation.json."""

    def launched(recipe, task, **_):
        processes = 1 if recipe.launch.processes == "auto" else recipe.launch.processes
        file = tmp_path / "request.json"
        file.write_text(task.model_dump_json())
        ranks(processes, measure_there, recipe, file)
        return 0

    monkeypatch.setattr(evaluate_model, "_launch", launched)

    def evaluate(target, *overrides, **options):
        console = Console(file=io.StringIO(), width=200)
        assert (
            evaluate_model.evaluate(target, overrides, evaluate_model.EvaluateOptions(**options), console=console) == 0
        )
        to = options.get("to") or (
            target if "export" in target.name else target.parents[1] if "step" in target.name else target
        )
        return json.loads((to / "evaluation.json").read_text()) | {"said": console.file.getvalue()}

    return evaluate


@pytest.fixture(scope="module")
def exports(run, tmp_path_factory):
    """One of each kind, in a place of their own."""
    folder = tmp_path_factory.mktemp("exports")
    for kind in KINDS:
        trained_model.export(run, [f"export.kind={kind}"], folder / f"export-{kind}")
    return folder


def digits_to_test():
    return digits.build(digits.Config(kind="digits"), "test")


@pytest.fixture(scope="module")
def expected(run):
    """Plain predictions of the test split -> logits, labels."""
    split, predictor = digits_to_test(), trained_model.open_predictor(run)
    return predictor.outputs(list(split.images)), torch.from_numpy(split.labels)


def figures(found):
    return [found[name] for name in ("loss", "accuracy", "f1", "own", "ece")]


def test_any_number_of_processes_writes_the_same_bytes(run, evaluate, tmp_path):
    for processes in (1, 2, 3):
        evaluate(run, f"launch.processes={processes}", to=tmp_path / f"{processes}")
    for name in ("evaluation.json", "evaluation.html", "confusion.svg"):
        assert len({(tmp_path / f"{processes}" / name).read_bytes() for processes in (1, 2, 3)}) == 1, name


@pytest.mark.parametrize("processes", [1, 3])
def test_evaluations_in_training_measure_the_part_that_a_limit_names(
    ranks, run, evaluate, expected, tmp_path, processes
):
    """Samples spread evenly over the split, the same for any number of processes; the command measures all."""
    recipe = Recipe.model_validate(
        {
            "run": {"dir": tmp_path, "name": "limited"},
            "data": {"kind": "digits", "limit": 320},
            "model": {"kind": "user", "file": run.parent / "sure.py"},
            "train": {"steps": 12},
            "optim": {"lr": 0.004},
            "evaluate": {"limit": 50},
            "observe": {"sinks": ["jsonl"]},
        }
    )
    ranks(processes, train_there, recipe)
    summary, whole = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "limited", run))
    assert summary["digest"] == whole["digest"]
    logits, labels = (column[[number * len(column) // 50 for number in range(50)]] for column in expected)
    found = logits.argmax(1)
    assert summary["evaluation"]["accuracy"] == pytest.approx((found == labels).sum().item() / 50)  # a float32
    assert summary["confusion_matrix"] == confusion_matrix(labels, found, labels=range(10)).tolist()
    assert evaluate(tmp_path / "limited")["samples"] == len(expected[1])


def test_figures_are_scikit_learns(run, evaluate, expected):
    found = evaluate(run)
    logits, labels = expected
    predicted, probabilities = logits.argmax(1), logits.softmax(1)
    told = classification_report(labels, predicted, output_dict=True, zero_division=0)
    assert found["samples"] == 355 and found["accuracy"] == pytest.approx(told["accuracy"])
    assert found["f1"] == pytest.approx(f1_score(labels, predicted, average="macro"), abs=1e-6)
    for one in found["classes"]:
        like = told[one["label"]]
        assert [one["precision"], one["recall"], one["f1"]] == [like["precision"], like["recall"], like["f1-score"]]
        assert one["support"] == like["support"]
    assert found["confusion_matrix"] == confusion_matrix(labels, predicted).tolist()
    bins = np.minimum((probabilities.max(1).values.numpy() * 15).astype(int), 14)
    gaps = [(probabilities.max(1).values - (predicted == labels).float())[bins == b].sum().abs() for b in range(15)]
    assert found["ece"] == pytest.approx(float(sum(gaps)) / 355, abs=1e-5)
    assert found["loss"] == json.loads((run / "summary.json").read_text())["evaluation"]["loss"]
    assert found["loss"] != pytest.approx(log_loss(labels, logits.double().softmax(1), labels=range(10)), rel=1e-3)
    assert found["checkpoint"].endswith("step-000000012") and "accuracy" in found["said"]


def test_one_checkpoint_is_told_in_the_runs_folder(run, evaluate):
    checkpoint = run / "checkpoints" / "step-000000012"
    assert evaluate(checkpoint, split="train")["samples"] == 320
    assert {"evaluation.json", "evaluation.html", "confusion.svg"} <= {path.name for path in run.iterdir()}
    assert not (checkpoint / "evaluation.json").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_runs_figures(run, exports, evaluate, kind, tmp_path):
    """With the user's own loss and metric, on another number of processes."""
    whole, found = evaluate(run, to=tmp_path), evaluate(exports / f"export-{kind}", "launch.processes=2")
    exact = 1e-6 if kind == "onnx" else 0
    assert figures(found) == pytest.approx(figures(whole), rel=exact, abs=exact)
    assert [one["index"] for one in found["worst"]] == [one["index"] for one in whole["worst"]]


def test_worst_samples_are_the_worst(run, evaluate, expected, tmp_path):
    found = evaluate(run, worst=5, to=tmp_path)["worst"]
    losses = torch.nn.functional.cross_entropy(expected[0].double(), expected[1], reduction="none")
    assert [one["index"] for one in found] == losses.argsort(descending=True)[:5].tolist()
    assert [one["loss"] for one in found] == pytest.approx(losses.sort(descending=True).values[:5].tolist(), rel=1e-5)
    html = (tmp_path / "evaluation.html").read_text()
    assert html.count('src="data:image/png;base64,') == 5 and f"sample {found[0]['index']} " in html


def boarded(folder):
    """What TensorBoard reads of a run -> tags and their events, and titles of pictures."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    found = {tag: accumulator.Tensors(tag) for tag in accumulator.Tags()["tensors"]}
    return found, {tag: accumulator.SummaryMetadata(tag).display_name for tag in found}


def test_worst_samples_are_in_tensorboard_once(run, evaluate, expected, tmp_path):
    """Also after a second evaluation of the step and after resumes, which take back what came after their steps."""
    folder = shutil.copytree(run, tmp_path / "r")
    for count in (7, 3):
        worst = evaluate(folder, "observe.sinks=[tensorboard]", f"run.dir={tmp_path}", worst=count)["worst"]
    sink = tensorboard.build(folder)
    facts = {"name": "r", "folder": folder, "total_steps": 20, "steps_per_epoch": 5, "world_size": 1}
    facts |= {"device": "CPU", "parameters": 1, "train_samples": 1}
    sink.notice(RunStarted(resumed_step=12, **facts))
    sink.close()
    found, titles = boarded(folder)
    pictures = [f"worst/{number:02}" for number in (1, 2, 3)]
    assert [tag for tag in found if tag.startswith("worst/0")] == pictures
    for tag, sample in zip(pictures, worst, strict=True):
        [event] = found[tag]
        width, height, file = event.tensor_proto.string_val
        assert (event.step, width, height) == (12, b"8", b"8")
        pixels = np.asarray(Image.open(io.BytesIO(file)).convert("L"))
        assert (pixels == digits_to_test().images[sample["index"]][0]).all()
        loss = f"{sample['loss']:.3g}"
        assert titles[tag] == f"{tag}: {sample['label']}, predicted {sample['predicted']}, loss {loss}"
    [event] = found["worst/text_summary"]
    assert f"| 01 | {worst[0]['label']} | {worst[0]['predicted']} |" in event.tensor_proto.string_val[0].decode()
    [file] = (folder / "tensorboard").glob("*.evaluation-12")
    file.rename(file.with_name("events.out.tfevents.0000000001.evaluation-12"))  # long ago: files are read by time
    sink = tensorboard.build(folder)
    sink.notice(RunStarted(resumed_step=6, **facts))
    sink.close()
    assert not [tag for tag, events in boarded(folder)[0].items() if tag.startswith("worst") and events]


def folder_of_images(folder, size=(8, 8)):
    split = digits_to_test()
    for number, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).resize(size, Image.Resampling.NEAREST).save(folder / str(label) / f"{number:04}.png")
    return folder


def test_a_folder_of_images(exports, evaluate, tmp_path):
    export = exports / "export-safetensors"
    whole = evaluate(export, to=tmp_path / "split")
    found = evaluate(export, "launch.processes=2", file=folder_of_images(tmp_path / "images"), to=tmp_path / "file")
    assert (found["samples"], found["confusion_matrix"]) == (355, whole["confusion_matrix"])
    assert found["worst"][0]["origin"].startswith(str(tmp_path / "images"))
    large = evaluate(export, file=folder_of_images(tmp_path / "large", (20, 16)), to=tmp_path / "scaled")
    assert large["accuracy"] > 0.9 * whole["accuracy"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"file": Path("none.csv")}, "there is no file or folder none.csv"),
        ({"file": Path("a.pdf")}, "a.pdf is of no known form: --file takes a table"),
        ({"split": "tset"}, "there is no split 'tset' — did you mean 'test'?"),
        ({"to": Path("a.pdf")}, "cannot write to .*a.pdf: .*--to"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(run, tmp_path, monkeypatch, options, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pdf").write_text("")
    with pytest.raises((ConfigError, DataError), match=error):
        evaluate_model.evaluate(run, [], evaluate_model.EvaluateOptions(**options), console=Console())


def test_two_evaluations_of_a_run_do_not_mix(run):
    """Their logs and what they are asked lie in its folder."""
    with FileLock(run / ".evaluate.lock"), pytest.raises(ConfigError, match="just being evaluated by another process"):
        evaluate_model.evaluate(run, [], evaluate_model.EvaluateOptions(), console=Console())


IMAGES = DataSpec(modality="image", labels=("cat", "dog"), image_shape=(1, 8, 8))
TEXTS = DataSpec(modality="text", labels=("cat", "dog"))


@pytest.mark.parametrize(
    ("text", "spec", "error"),
    [
        ("text,label\nmeow,cat\nmoo,cow\n", TEXTS, r"row 2 of .* 'cow', which the model does not know \(cat, dog\)"),
        ("body,label\nmeow,cat\n", TEXTS, "has no column 'text': set data.text_column"),
        ("text,label\nmeow,cat\n", IMAGES, "is a table of texts, but the model takes images"),
        (None, TEXTS, "is a folder of images, but the model takes texts"),
    ],
)
def test_files_that_do_not_fit(tmp_path, text, spec, error):
    file = tmp_path / "t.csv" if text else tmp_path
    if text:
        file.write_text(text)
    with pytest.raises(DataError, match=error):
        of_file(file, spec, text_column="text", label_column="label", takes_tokens=spec is TEXTS)


EVIL = "<script>alert('x')</script> & \ud83d"


@pytest.fixture
def texts_export(tmp_path, minilm):
    """A tiny encoder that knows nothing, with a real tokenizer."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    small = DistilBertConfig(vocab_size=30522, dim=8, hidden_dim=8, n_layers=1, n_heads=1, num_labels=2)
    torch.manual_seed(0)
    section = transformer.Config(kind="transformer", name=str(minilm))
    model = transformer.TextModel(DistilBertForSequenceClassification(small), TEXTS)
    transformer.save(model, tmp_path / "export")
    transformer.tokenizer(section).save(tmp_path / "export")
    recipe = Recipe.model_validate({"model": section, "data": {"kind": "files", "train": "gone.csv"}})
    carried = recipe.model_dump(mode="json") | {"run": {"dir": "/gone", "name": "gone"}}
    known = {"name": "t", "kind": "pretrained", "step": 3, "digest": "0" * 64, "metrics": {}, "recipe": carried}
    export_facts.write(
        export_facts.facts_of(section, TEXTS, inputs=("input_ids", "attention_mask"), **known), tmp_path / "export"
    )
    return tmp_path / "export"


def test_a_table_of_texts(texts_export, evaluate, tmp_path):
    """Of other columns, on a machine that has neither the run nor its data; with what a text may hold."""
    texts = [EVIL.encode(errors="replace").decode(), *(f"the cat {'and the dog ' * n}" for n in range(20))]
    rows = [{"body": text, "kind": "dog" if n % 3 else "cat"} for n, text in enumerate(texts)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = ["data.text_column=body", "data.label_column=kind", f"data.cache={tmp_path / 'cache'}"]
    found = evaluate(texts_export, *columns, "launch.processes=2", file=tmp_path / "t.jsonl", worst=30)
    predictor = trained_model.open_predictor(texts_export)
    probabilities = [predictor.outputs(predictor.encode([text]))[0].double().softmax(0).numpy() for text in texts]
    labels = [["cat", "dog"].index(row["kind"]) for row in rows]
    assert found["samples"] == 21
    assert found["loss"] == pytest.approx(log_loss(labels, np.array(probabilities), labels=[0, 1]), rel=1e-4)
    html = (texts_export / "evaluation.html").read_text()
    assert "<script" not in html and "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp;" in html
    assert "row 1 of" in html and "http" not in re.sub(
        r'http-equiv|xmlns(:xlink)?="http://www.w3.org/(2000/svg|1999/xlink)"', "", html
    )


def overconfident(samples=4000, factor=4.0):
    """Logits `factor` times too large for labels that are drawn from the right ones."""
    generator = torch.Generator().manual_seed(0)
    right = 2 * torch.randn(samples, 5, generator=generator)
    return factor * right, torch.multinomial(right.softmax(1), 1, generator=generator).flatten()


def test_temperature_lowers_the_calibration_error():
    logits, labels = overconfident()
    found = fitted(logits, labels)
    assert found.temperature == pytest.approx(4.0, rel=0.1)
    first = half(4000)
    assert found.samples == first.sum()
    assert abs(found.samples - 2000) < 100
    assert found.ece_before == ece(logits[~first], labels[~first]) > 0.15
    assert found.ece_after == ece(logits[~first], labels[~first], found.temperature) < 0.04
    again = fitted(logits, labels.where(first, 0))
    assert again.temperature == found.temperature  # the other half has no part in it
    confidence, predicted = logits.softmax(1).max(1)
    edges = torch.linspace(0, 1, 16)[1:-1]
    bins, right = torch.bucketize(confidence, edges), (predicted == labels).float()
    total = sum(abs((confidence - right)[bins == number].sum()) for number in range(15))
    assert total / 4000 == pytest.approx(ece(logits, labels), abs=1e-3)
    with pytest.raises(ModelError, match="more samples"):
        fitted(logits[:1], labels[:1])


def test_an_export_is_calibrated(exports, evaluate, tmp_path):
    target = tmp_path / "export"
    shutil.copytree(exports / "export-pretrained", target)
    images = list(digits_to_test().images[:20])
    before = trained_model.open_predictor(target)
    found = evaluate(target, calibrates=True, split="train")["calibration"]
    assert found["is_kept"] and found["ece_after"] < found["ece_before"] and found["temperature"] != 1
    after = trained_model.open_predictor(target)
    scaled = (before.outputs(images) / found["temperature"]).softmax(1).numpy()
    assert np.array_equal(after.scores(images), scaled)
    assert not np.allclose(after.scores(images), before.scores(images), atol=1e-3)
    again = evaluate(target, "launch.processes=2", split="train")
    assert again["temperature"] == found["temperature"] and again["ece"] == pytest.approx(found["ece_after"], abs=0.1)


def test_a_run_hands_its_calibration_to_its_exports(run, evaluate, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    found = evaluate(copy, calibrates=True, split="train", to=tmp_path / "out")["calibration"]
    assert trained_model.export(copy, [], tmp_path / "a")[0].calibration.temperature == found["temperature"]
    kept = json.loads((copy / "calibration.json").read_text())
    (copy / "calibration.json").write_text(json.dumps(kept | {"digest": "of other weights"}))
    assert trained_model.export(copy, [], tmp_path / "b")[0].calibration is None


def test_outputs_that_are_not_finite():
    predictions = Predictions(3, rows=lambda *_: None)
    predictions.add((0, 2, 1), (torch.tensor([[0.0, 1], [0, 1], [torch.nan, 1]]), torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(ModelError, match="not finite for 1 of 3 samples, the first of them sample 1"):
        evaluation_report.check(predictions, Texts(["a", "b", "c"], np.zeros(3), ["x", "y"]))


def test_the_command_itself(exports, tmp_path):
    """Through the launcher, with nothing but the export's folder; and a mistake that only the processes can see."""
    shutil.copytree(exports / "export-onnx", tmp_path / "alone")
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "pets" / "cat" / "1.png")
    command = ["lockstep", "evaluate", "alone", "launch.processes=2"]
    files = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    good, wrong = (warm.Popen([*command, *more], **files) for more in ((), ("--file", "pets", "--to", "pets")))
    out, err = good.communicate(timeout=100)
    assert (good.returncode, err) == (0, ""), err
    assert "355 samples: the test split" in out and "F1 (macro)" in out
    assert {"evaluation.json", "evaluation.html", "confusion.svg"} <= {
        path.name for path in (tmp_path / "alone").iterdir()
    }
    out, err = wrong.communicate(timeout=100)
    assert (wrong.returncode, out, err.count("\n")) == (2, "", 1), out + err
    assert "'cat', which the model does not know (0, 1, 2" in err
    assert [path.name for path in (tmp_path / "pets").iterdir()] == ["cat"]
