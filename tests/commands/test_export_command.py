"""Exports on the command line, their card, and what is opened again to predict with."""

import json
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # transformers imports it, which sets a variable: better here than inside a test
import yaml
from PIL import Image
from typer.testing import CliRunner

from lockstep.base.errors import DataError, ModelError
from lockstep.cli import _app
from lockstep.data.images import MAX_PIXELS
from lockstep.inference import trained_model
from lockstep.inference.export import export_facts
from lockstep.inference.export.export_reader import is_export
from lockstep.launch import launch_run
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust

KINDS = {
    "export": [],
    "export-safetensors": ["export.kind=safetensors"],
    "export-state_dict": ["export.kind=state_dict", "export.file=digits.pt"],
    "export-torch_export": ["export.kind=torch_export"],
    "export-onnx": ["export.kind=onnx"],
    "export-onnx-int8": ["export.kind=onnx", "export.dtype=int8"],
    "export-bf16": ["export.dtype=bf16"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a second, by a process that has a secret."""
    root = tmp_path_factory.mktemp("home") / "runs"
    root.mkdir()
    settings = [f"run.dir={root}", "run.name=a", "train.steps=8", "data.limit=200", "launch.environment.TOKEN=hunter2"]
    (root / "c.yaml").write_text("data: {kind: digits}\nparallel: {kind: single}\n")
    recipe = recipes.load(root / "c.yaml", settings)
    trusted = recipe_trust.authorize(recipe, root / "c.yaml", trusts=False)
    assert launch_run.launch(recipe, ("--resume", "never", *trusted)) == 0
    return root / "a"


@pytest.fixture(scope="module")
def exports(run):
    """What the command said for each kind, all of one run."""
    said = {}
    for name, settings in KINDS.items():
        result = CliRunner().invoke(_app.app, ["export", str(run), *settings])
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        said[name] = result.stdout
    return said


def test_every_kind_has_a_folder_of_its_own(run, exports):
    assert {path.name for path in run.glob("*export*")} == set(KINDS)
    assert not list(run.glob(".export*"))
    for name, said in exports.items():
        facts = export_facts.read(run / name)
        assert said == f"exported step 8 to {run / name}; {facts.agreement.summary(facts.dtype)}\n"
        fp32 = "outputs on 24 real samples are equal"
        assert (fp32 if facts.dtype == "fp32" else "another label and takes accuracy") in said
        assert ("the same weights bit for bit" in said) == (
            name in ("export", "export-safetensors", "export-state_dict")
        )


def test_facts_are_those_of_the_run(run, exports):
    summary = json.loads((run / "summary.json").read_text())
    for name in KINDS:
        facts = export_facts.read(run / name)
        assert (facts.name, facts.step, facts.metrics) == ("a", 8, summary["evaluation"])
        assert facts.torch_version == summary["torch_version"] == torch.__version__
        assert facts.labels == tuple("0123456789")
        assert facts.digest == summary["digest"]
        assert facts.title == f"a@{facts.digest[:8]}"


def test_another_export_takes_the_place_of_the_first(run, exports):
    before = {path: path.read_bytes() for path in (run / "export-state_dict").iterdir()}
    again = CliRunner().invoke(_app.app, ["export", str(run), "export.kind=state_dict", "export.file=again.pt"])
    assert (again.exit_code, again.stderr) == (0, "")
    assert {path.name for path in (run / "export-state_dict").iterdir()} == {"README.md", "again.pt", "lockstep.json"}
    assert (run / "export-state_dict" / "again.pt").exists() and not (run / "export-state_dict" / "digits.pt").exists()
    assert len(before) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["export.dtype=int8"], "export.kind=pretrained cannot hold int8; it can hold fp32, fp16, bf16"),
        (["export.kind=onxn"], "there is no export 'onxn' — did you mean 'onnx'?"),
        (["export.kind=onnx", "export.file=a.pt"], "export.file names the file of state_dict; export.kind=onnx writes"),
        (["export.kind=state_dict", "export.file=lockstep.json"], "export.file: "),
        (["--to", "/dev/null"], "cannot write the export to /dev/null"),
    ],
)
def test_mistakes_are_told_in_one_line(run, settings, message):
    result = CliRunner().invoke(_app.app, ["export", str(run), *settings])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_card_that_the_hub_can_read(run, exports):
    for name in KINDS:
        _, front, text = (run / name / "README.md").read_text().split("---\n", 2)
        facts, head = export_facts.read(run / name), yaml.safe_load(front)
        assert head["pipeline_tag"] == "image-classification"
        assert "lockstep" in head["tags"]
        (result,) = head["model-index"][0]["results"]
        assert {each["type"]: each["value"] for each in result["metrics"]} == facts.metrics
        name = "Optical Recognition of Handwritten Digits (UCI, as in scikit-learn)"
        assert result["dataset"] == {"name": name, "type": "digits", "split": "test"}
        assert facts.digest in text and '10 classes of images apart: "0", "1", "2"' in text
        assert f"| accuracy | {facts.metrics['accuracy']:.4f} |" in text
        assert facts.agreement.summary(facts.dtype) in text
        again = recipes.of_sections(yaml.safe_load(re.search("```yaml\n(.*?)```", text, re.DOTALL)[1]))
        assert (again.train.steps, again.data.limit) == (8, 200)


def test_what_only_concerns_a_machine_stays_there(run, tmp_path, monkeypatch):
    """Folders of one's home, accounts, variables: an export is given to others."""
    home = run.parents[1]
    monkeypatch.setenv("HOME", str(home))
    trained_model.export(run, None, tmp_path / "e")
    assert "hunter2" in (run / "recipe.yaml").read_text()
    for file in (tmp_path / "e").iterdir():
        assert b"hunter2" not in file.read_bytes() and str(home).encode() not in file.read_bytes()
    assert "dir" not in export_facts.read(tmp_path / "e").recipe["run"]
    assert "  dir: " not in (tmp_path / "e" / "README.md").read_text()


@pytest.fixture(scope="module")
def pictures():
    """Real digits as PNG files."""
    from sklearn.datasets import load_digits

    found = []
    for pixels in load_digits().images[:5]:
        buffer = BytesIO()
        Image.fromarray((pixels * 15).astype(np.uint8)).save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


@pytest.mark.parametrize("name", ["checkpoints/step-000000008", *KINDS])
def test_a_predictor_out_of_anything(run, exports, pictures, name):
    """A run, a checkpoint and every export of it say the same."""
    expected = trained_model.open_predictor(run)
    predictor = trained_model.open_predictor(run / name)
    samples = predictor.encode(pictures)
    assert samples[0].shape == (1, 8, 8)
    probabilities = predictor.scores(samples)
    assert probabilities.shape == (5, 10) and np.allclose(probabilities.sum(1), 1, atol=1e-5)
    reduced = predictor.facts.dtype != "fp32"
    assert np.allclose(probabilities, expected.scores(samples), atol=0.02 if reduced else 1e-6)
    assert np.allclose(predictor.scores(samples[:1]), probabilities[:1], atol=0.02 if reduced else 1e-6)
    assert predictor.facts.labels == tuple("0123456789")


def test_a_predictor_in_another_dtype(run, exports, pictures):
    predictor = trained_model.open_predictor(run / "export", dtype="bf16")
    assert {parameter.dtype for parameter in predictor.forward.parameters()} == {torch.bfloat16}
    assert predictor.scores(predictor.encode(pictures)).dtype == np.float32
    with pytest.raises(ModelError, match="runs on the processor as fp32: leave --device and --dtype out"):
        trained_model.open_predictor(run / "export-onnx", dtype="bf16")


def picture(image, form="PNG"):
    buffer = BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def test_images_of_any_form_are_taken(run, exports, tmp_path):
    predictor = trained_model.open_predictor(run / "export")
    grey = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)
    plain = predictor.encode([picture(Image.fromarray(grey))])[0]
    assert np.array_equal(plain[0], grey)
    Image.fromarray(grey).save(tmp_path / "a.bmp")
    others = [
        picture(Image.fromarray(grey.astype(np.uint16) * 256)),
        picture(Image.fromarray(np.stack([grey] * 3, axis=2))),
        picture(Image.fromarray(np.stack([*[grey] * 3, np.full_like(grey, 7)], axis=2))),
        picture(Image.fromarray(grey).resize((80, 80), Image.Resampling.NEAREST)),
        tmp_path / "a.bmp",
    ]
    for sample in predictor.encode(others):
        assert sample.shape == (1, 8, 8) and sample.dtype == np.uint8
        assert np.abs(sample[0].astype(int) - grey).max() <= 6  # scaled down, edges are mixed with what lies beside


def test_what_is_no_image_is_told(run, exports, tmp_path):
    predictor = trained_model.open_predictor(run / "export")
    bomb = picture(Image.new("1", (MAX_PIXELS // 8000 + 1, 8000)))
    assert len(bomb) < 100_000
    whole = picture(Image.new("L", (50, 50), 9))
    for wrong in (b"", b"no image", whole[: len(whole) // 2], bomb, tmp_path / "missing.png", "a text"):
        with pytest.raises(DataError):
            predictor.encode([whole, wrong])


def test_texts_that_cannot_be_encoded(minilm, tmp_path):
    import exporting

    (tmp_path / "bert").mkdir()
    exporting.text_case(tmp_path / "bert", minilm).export(tmp_path / "e")
    predictor = trained_model.open_predictor(tmp_path / "e")
    short, empty, long, odd = predictor.encode(["the striker scored", "", "word " * 500, "caf\u00e9 \U0001f600 \x00"])
    assert (len(empty), len(long)) == (2, 24)
    probabilities = predictor.scores([short, empty, long, odd])
    assert np.allclose(probabilities[:1], predictor.scores([short]), atol=1e-5)
    assert predictor.encode([]) == []
    with pytest.raises(DataError, match="^character 3 is half of a surrogate pair"):
        predictor.encode(["fine", "ab\ud83d"])
    with pytest.raises(DataError, match="takes texts, not bytes"):
        predictor.encode([b"bytes"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ("\udcff", "Invalid JSON"),
        ('{"name": "a"}', "kind: Field required"),
        (("dtype", "fp4"), "dtype: Input should be 'fp32', 'fp16', 'bf16' or 'int8'"),
    ],
)
def test_facts_that_cannot_be_used(run, exports, tmp_path, text, reason):
    if isinstance(text, tuple):
        text = json.dumps({**json.loads((run / "export" / "lockstep.json").read_text()), text[0]: text[1]})
    (tmp_path / "lockstep.json").write_bytes(text.encode(errors="surrogateescape"))
    assert is_export(tmp_path)
    with pytest.raises(ModelError, match=re.escape(reason)) as caught:
        trained_model.open_predictor(tmp_path)
    assert "\n" not in str(caught.value)
    assert "newer version of Lockstep" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("kind", "gguf"), ("model", {"kind": "mamba"}), ("model", {"kind": "cnn", "depth": 3})]
)
def test_facts_of_a_later_version(run, exports, tmp_path, key, value):
    """What it does not know it says; what it need not know it passes over."""
    facts = {**json.loads((run / "export" / "lockstep.json").read_text()), "new": 1}
    (tmp_path / "model.safetensors").write_bytes((run / "export" / "model.safetensors").read_bytes())
    (tmp_path / "lockstep.json").write_text(json.dumps(facts))
    assert trained_model.open_predictor(tmp_path).facts == export_facts.read(run / "export")
    (tmp_path / "lockstep.json").write_text(json.dumps({**facts, key: value}))
    with pytest.raises(ModelError, match=f"the export {tmp_path} cannot be "):
        trained_model.open_predictor(tmp_path)


def test_what_is_neither_export_nor_run(tmp_path):
    with pytest.raises(ModelError, match=r"is no export: there is no lockstep.json in it; `lockstep export RUN`"):
        export_facts.read(tmp_path)
    with pytest.raises(Exception, match="is neither an export nor a run"):
        trained_model.open_predictor(tmp_path)
    with pytest.raises(Exception, match="is neither an export nor a run"):
        trained_model.open_predictor(Path("/dev/null"))
    (tmp_path / "recipe.yaml").write_text("mdoel: {}\n")
    with pytest.raises(Exception, match="mdoel"):
        trained_model.open_predictor(tmp_path)
