"""A Hugging Face Space of a run: what is written is what lies in deploy/space, and what was edited there stays."""

import subprocess

import numpy as np
import pytest
import warm
from PIL import Image
from places import ROOT
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from lockstep.cli import _app
from lockstep.inference.export import export_facts, space

EXAMPLE = ROOT / "deploy" / "space"


def facts(**more):
    return export_facts.ExportFacts(
        name="ag-news", modality="text", labels=("World", "Sports", "Business", "Sci/Tech"), model={"kind": "transformer"},
        **{"kind": "pretrained", "step": 1, "digest": "0" * 64, "metrics": {}, "recipe": {}, **more},
    )  # fmt: skip


def test_the_example_is_what_is_written():
    """Of another version: python tests/test_space.py writes it anew."""
    assert {path.name: path.read_text() for path in EXAMPLE.iterdir()} == space.texts(facts())


def test_the_hub_can_read_it():
    from huggingface_hub import SpaceCard

    found = SpaceCard.load(EXAMPLE / "README.md").data
    assert (found.title, found.sdk, found.app_port) == ("ag-news", "docker", 7860)


def test_onnx_comes_with_what_runs_it():
    assert 'pip install --no-cache-dir "lockstep-train[onnx,serve]==$' in space.texts(facts(kind="onnx"))["Dockerfile"]
    assert '"lockstep-train[serve]==$' in space.texts(facts())["Dockerfile"]


def test_weights_go_to_lfs(tmp_path):
    """By git's own reading of the file."""
    space.write(tmp_path, facts())
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    for name, kind in {
        "model.safetensors": "lfs",
        "model.onnx": "lfs",
        "model.pt2": "lfs",
        "x.py": "unspecified",
    }.items():
        argv = ["git", "check-attr", "filter", f"model/{name}"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"model/{name}: filter: {kind}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    settings = ["train.epochs=1", "data.limit=200", "run.name=a", f"run.dir={folder}", "launch.processes=1"]
    done = warm.run(["lockstep", "train", str(ROOT / "examples" / "digits.yaml"), *settings], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "a"


def lockstep(*arguments, code=0):
    result = CliRunner().invoke(_app.app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_a_space_of_a_run(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")  # which the command sets
    assert f"to {run / 'space'}; read back: the same weights bit for bit" in lockstep("export", run, "--space")
    written = {path.name for path in (run / "space").iterdir()}
    assert written == {"README.md", "Dockerfile", ".gitattributes", "model"}
    assert "tells 10 classes of images apart" in (run / "space" / "README.md").read_text()
    image = (load_digits().images[0] * 15).astype(np.uint8)
    Image.fromarray(image).save(tmp_path / "0.png")
    for model in (run, run / "space" / "model", next((run / "checkpoints").iterdir())):
        lockstep("predict", model, tmp_path, "--out", tmp_path / f"{model.name}.csv", "--processes", 1)
    assert len({path.read_text() for path in tmp_path.glob("*.csv")}) == 1


def test_what_was_edited_stays(run, tmp_path):
    """As in the clone of a Space that was made on the hub."""
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "README.md").write_text("---\ntitle: Mine\nsdk: docker\n---\n")
    (clone / "app.py").write_text("mine")
    (clone / ".gitattributes").write_text("*.bin -filter\n*.txt text")
    for _ in range(2):
        lockstep("export", run, "--space", "--to", clone)
        assert (clone / "README.md").read_text() == "---\ntitle: Mine\nsdk: docker\n---\n"
        assert (clone / "app.py").read_text() == "mine"
        attributes = (clone / ".gitattributes").read_text().splitlines()
        others = [line for line in space.texts(facts())[".gitattributes"].splitlines() if not line.startswith("*.bin ")]
        assert attributes == ["*.bin -filter", "*.txt text", *others]
    (clone / "README.md").write_text("# My project\n")
    assert "README.md that is no Docker Space's" in lockstep("export", run, "--space", "--to", clone, code=2)
    (clone / "Dockerfile").write_text("FROM scratch\n")
    assert "has another Dockerfile" in lockstep("export", run, "--space", "--to", clone, code=2)
    assert (clone / "Dockerfile").read_text() == "FROM scratch\n"
    (tmp_path / "file").touch()
    assert "is no folder" in lockstep("export", run, "--space", "--to", tmp_path / "file", code=2)


if __name__ == "__main__":
    for name, text in space.texts(facts()).items():
        (EXAMPLE / name).write_text(text)
