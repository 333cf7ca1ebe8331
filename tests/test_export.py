"""How a model leaves: what others load gives the same outputs, and a failed export leaves the last one whole."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch._dynamo  # transformers imports it, which sets a variable: better here than inside a test
from safetensors.torch import load_file
from torch import nn

from lockstep.contracts import DataSpec
from lockstep.errors import ModelError
from lockstep.export import ExportSection, Writing, export
from lockstep.models import cnn, transformer

PRETRAINED, STATE_DICT = ExportSection(), ExportSection(kind="state_dict", file="net.pt")
SPEC = DataSpec(modality="image", labels=("cat", "dog", "owl"), image_shape=(1, 8, 8))


class Plain(nn.Module):
    """A small network with everything that a state dict can hold: weights, buffers, dropout beside them."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, batch):
        return self.layers(batch["x"]) * self.factor


class Wrapped(nn.Module):
    """The same under another name, as a model of the user's own is wrapped."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.network = Plain(factor)

    def forward(self, batch):
        return self.network(batch)


class Tied(nn.Module):
    """Two layers that share one weight, as language models do."""

    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.back.weight = self.there.weight

    def forward(self, batch):
        return self.back(self.there(batch["x"]))


BATCH = {"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(0))}


def trained(make, seed=1):
    """A model with random weights and, where it has them, running statistics that are not the initial ones."""
    torch.manual_seed(seed)
    model = make().train()
    for _ in range(3):
        model({"x": torch.randn(8, 4)})
    return model


def write(model, target, section=PRETRAINED, make=Plain, **more):
    facts = {"note": "caf\u00e9"}
    return export(model, BATCH, target, section=section, writing=Writing(rebuild=make, facts=facts, **more))


def read(target, make):
    """The export's weights in a module of the same making."""
    model = make()
    getattr(model, "network", model).load_state_dict(load_file(target / "model.safetensors"))
    return model


def listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def outputs(model):
    with torch.no_grad():
        return model.eval()(BATCH)


@pytest.mark.parametrize("make", [Plain, Wrapped, Tied])
def test_a_folder_gives_the_same_outputs(tmp_path, make):
    model = trained(make)
    target = write(model, tmp_path / "new" / "folders" / "export", make=make)
    assert target == tmp_path / "new" / "folders" / "export"
    assert {path.name for path in target.iterdir()} == {"config.json", "loader.py", "model.safetensors"}
    assert json.loads((target / "config.json").read_text(encoding="utf-8")) == {"note": "caf\u00e9"}
    assert torch.equal(outputs(model), outputs(read(target, make)))
    names = load_file(target / "model.safetensors").keys()
    assert not any(name.startswith("network.") for name in names)
    assert [path.name for path in target.parent.iterdir()] == ["export"]


@pytest.mark.parametrize("make", [Plain, Wrapped, Tied])
def test_a_state_dict_loads_into_the_unwrapped_module(tmp_path, make):
    model = trained(make)
    file = write(model, tmp_path / "out", STATE_DICT, make=make)
    assert file == tmp_path / "out" / "net.pt"
    plain = Plain() if make is Wrapped else make()
    plain.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(outputs(model), outputs(plain))


def test_a_state_dict_leaves_its_neighbours_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write(trained(Plain), tmp_path, STATE_DICT)
    write(trained(Plain, seed=2), tmp_path, STATE_DICT)
    assert set(listing(tmp_path)) == {"notes.txt", "net.pt"}


def test_extra_files_travel_with_the_model(tmp_path):
    target = write(trained(Plain), tmp_path / "e", extra=lambda folder: (folder / "tokens.txt").write_text("a b"))
    assert (target / "tokens.txt").read_text() == "a b"


LOAD = """
import runpy, sys, numpy, torch
loader = runpy.run_path(sys.argv[1] + "/loader.py", run_name="__main__")
with torch.no_grad():
    logits = loader["load"]()({"image": torch.from_numpy(numpy.load(sys.argv[2]))})
numpy.save(sys.argv[3], logits.numpy())
"""


@pytest.fixture
def exported_cnn(tmp_path):
    """A network on images, its export, a batch, and its own outputs."""
    torch.manual_seed(3)
    config = cnn.Config(kind="cnn", mean=0.5)
    model = cnn.build(config, SPEC).eval()
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8), dtype=np.uint8)
    shape = {"modality": "image", "labels": SPEC.labels, "image_shape": SPEC.image_shape}
    facts = {"model": config.model_dump(mode="json"), "data": shape}
    batch = {"image": torch.from_numpy(images)}
    writing = Writing(rebuild=lambda: cnn.build(config, SPEC), facts=facts)
    target = export(model, batch, tmp_path / "an export", section=PRETRAINED, writing=writing)
    with torch.no_grad():
        return target, images, model(batch).numpy()


def run(*argv, cwd):
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=cwd, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_stranger_loads_the_export(exported_cnn, tmp_path):
    """In a process of its own, elsewhere, with nothing but the folder."""
    target, images, expected = exported_cnn
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    np.save(elsewhere / "images.npy", images)
    printed = run("-c", LOAD, target, "images.npy", "logits.npy", cwd=elsewhere)
    assert printed.startswith("CNN(") and "Conv2d(32, 64" in printed
    assert np.allclose(np.load(elsewhere / "logits.npy"), expected, atol=1e-6)
    assert len({tuple(row) for row in expected.tolist()}) == 6


def test_a_transformer_is_written_in_its_own_format(tmp_path):
    """What plain transformers reads back, with the tokenizer beside it."""
    from transformers import AutoModelForSequenceClassification, DistilBertConfig, DistilBertForSequenceClassification

    small = DistilBertConfig(vocab_size=50, dim=8, hidden_dim=16, n_layers=2, n_heads=2, num_labels=3)
    torch.manual_seed(0)
    model = transformer.TextClassifier(DistilBertForSequenceClassification(small))
    batch = {"input_ids": torch.arange(24).view(3, 8), "attention_mask": torch.ones(3, 8, dtype=torch.int64)}
    writing = Writing(rebuild=lambda: pytest.fail("its own format needs no rebuilding"), facts={}, own=transformer)
    for _ in range(2):  # and over itself
        target = export(model, batch, tmp_path / "text", section=PRETRAINED, writing=writing)
    plain = AutoModelForSequenceClassification.from_pretrained(target).eval()
    with torch.no_grad():
        assert torch.equal(plain(**batch).logits, model.eval()(batch))


@pytest.mark.parametrize("section", [PRETRAINED, STATE_DICT], ids=lambda section: section.kind)
@pytest.mark.parametrize("before", [True, False])
def test_a_difference_keeps_the_old_export(tmp_path, section, before):
    target = tmp_path / "export"
    if before:
        write(trained(Plain), target, section)
    old = listing(tmp_path)
    with pytest.raises(ModelError, match=r"read back and differs \(largest difference [0-9.e+-]+\)"):
        write(trained(Plain, seed=2), target, section, make=lambda: Plain(factor=1.001))
    assert listing(tmp_path) == old
    assert [path.name for path in tmp_path.iterdir()] == (["export"] if before else [])


def test_a_failure_while_writing_keeps_the_old_export(tmp_path):
    def full(folder):
        raise OSError(28, "No space left on device")

    write(trained(Plain), tmp_path / "export")
    old = listing(tmp_path)
    with pytest.raises(ModelError, match=r"No space left on device.*--to"):
        write(trained(Plain, seed=2), tmp_path / "export", extra=full)
    assert listing(tmp_path) == old


def test_another_export_replaces(tmp_path):
    first, second = trained(Plain, seed=1), trained(Plain, seed=2)
    write(first, tmp_path / "e", extra=lambda folder: (folder / "old.txt").write_text("of the first"))
    write(second, tmp_path / "e")
    assert torch.equal(outputs(read(tmp_path / "e", Plain)), outputs(second))
    assert not torch.equal(outputs(first), outputs(second))
    assert not (tmp_path / "e" / "old.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_leftovers_of_a_killed_export_are_no_hindrance(tmp_path):
    for name in (".e.tmp", ".e.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("torn")
    write(trained(Plain), tmp_path / "e")
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


@pytest.mark.parametrize("names", [["thesis.txt"], ["config.json"], ["model.safetensors", "src/main.py"]])
def test_other_folders_are_never_replaced(tmp_path, names):
    target = tmp_path / "mine"
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("mine")
    old = listing(tmp_path)
    with pytest.raises(ModelError, match="holds other files and will not be replaced; name another folder with --to"):
        write(trained(Plain), target)
    assert listing(tmp_path) == old


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "model.safetensors" in listing(write(trained(Plain), tmp_path / "empty"))


@pytest.mark.parametrize("section", [PRETRAINED, STATE_DICT], ids=lambda section: section.kind)
@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_target_that_cannot_be_written(tmp_path, section, below):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelError, match=r"cannot write the export to .*file.*name another folder with --to"):
        write(trained(Plain), tmp_path / "file" / below, section)
    assert listing(tmp_path) == {"file": b"not a folder"}


def test_the_current_folder_is_a_folder_too(tmp_path, monkeypatch):
    """Relative targets, also the shortest one, which has no name."""
    from pathlib import Path

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = write(trained(Plain), Path(), STATE_DICT)
    assert file == tmp_path / "here" / "net.pt"
    assert os.path.samefile(write(trained(Plain), Path("below")), tmp_path / "here" / "below")
