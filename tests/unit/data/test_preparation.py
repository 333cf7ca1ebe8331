"""What a user's source does to images before the model takes them is done to files, too, or files are refused."""

import csv
import json

import numpy as np
import pytest
from PIL import Image
from running import lockstep, summary
from sklearn.datasets import load_digits

from lockstep.base import trust
from lockstep.base.errors import DataError
from lockstep.data.preparation import Preparation
from lockstep.data.processors import processor_of, reader_of
from lockstep.data.sources import _user
from lockstep.data.sources.user import Config

FILE = """
import numpy as np
from torch import nn
from sklearn.datasets import load_digits

from lockstep import DataSpec

WAY = {way!r}
WAYS = {{
    "plain": lambda x: x,
    "whole": lambda x: x.astype(np.float32),
    "wide": lambda x: x.astype(np.int64),
    "scaled": lambda x: x.astype(np.float32) / 255,
    "standardised": lambda x: (x.astype(np.float32) / 255 - 0.3) / 0.4,
    "last": lambda x: x.transpose(1, 2, 0),
    "double": lambda x: x / 255,
}}


class Digits:
    spec = DataSpec(modality="image", labels=tuple("0123456789"), image_shape=(1, 8, 8))
    lengths = None

    def __init__(self, split):
        rows, digits = slice(0, 1000) if split == "train" else slice(1000, 1060), load_digits()
        self.image = (digits.data[rows] * 15).astype(np.uint8).reshape(-1, 1, 8, 8)
        self.label = digits.target[rows]

    def __len__(self):
        return len(self.label)

    def __getitems__(self, indices):
        return {{"image": np.stack([{call}(self.image[i]) for i in indices]), "label": self.label[list(indices)]}}


def source(options, split):
    return Digits(split)


{name} = WAYS[WAY]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, batch):
        return self.body(batch["image"].float())


def build(options, spec):
    return Net()
"""


def opened(tmp_path, way, name="convert", call=None):
    file = tmp_path / f"{way}.py"
    file.write_text(FILE.format(way=way, name=name, call=call or name))
    trust.own(trust.code_with_imports(file))
    config = Config(kind="user", file=file)
    return _user.build(config, "test"), processor_of(config)


@pytest.mark.parametrize("way", ["plain", "whole", "wide"])
def test_pixels_are_read_as_they_are(tmp_path, way):
    source, processor = opened(tmp_path, way)
    assert not source.spec.prepared and processor is None
    assert reader_of(source.spec, processor).blank().dtype == np.uint8


TENSORS = """

import torch

from lockstep import LossSum


class Images(torch.utils.data.Dataset):
    spec = Digits.spec if {has_labels} else DataSpec(modality="image", image_shape=(1, 8, 8))

    def __init__(self, digits):
        self.digits = digits

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        image = torch.from_numpy(self.digits.image[index])
        return {{"image": image, "label": self.digits.label[index] if {has_labels} else (image[0] > 100).long()}}


def source(options, split):
    return Images(Digits(split))
"""
OWN_LOSS = """

def loss(outputs, batch):
    return LossSum(outputs.square().sum(), len(outputs))
"""


def write_pictures(folder):
    """The digits of the test split as files, in a folder for each class."""
    digits = load_digits()
    for number in range(1000, 1060):
        picture = folder / "pictures" / str(digits.target[number]) / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.data[number] * 15).astype(np.uint8).reshape(8, 8)).save(picture)


@pytest.mark.parametrize("has_labels", [True, False])
def test_images_that_are_tensors_are_pixels(tmp_path, has_labels):
    """Files are predicted as well as samples. A label that is an image is reported when the training starts."""
    text = FILE.format(way="plain", name="convert", call="convert") + TENSORS.format(has_labels=has_labels)
    (tmp_path / "own.py").write_text(text + OWN_LOSS * (not has_labels))
    own = {"kind": "user", "file": "own.py"}
    sections = {"optim": {"lr": 0.01}, "train": {"epochs": 5, "global_batch": 32}, "launch": {"processes": 1}}
    (tmp_path / "c.yaml").write_text(json.dumps({"data": own, "model": own, **sections}))
    done = lockstep(tmp_path, "train", "c.yaml", "run.name=a")
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "files cannot be predicted" not in said
    assert ("predict and serve cannot use this model: its data has neither labels" in said) != has_labels
    if has_labels:
        write_pictures(tmp_path)
        assert accuracy(tmp_path, "runs/a") == pytest.approx(summary(tmp_path, "a")["evaluation"]["accuracy"])
        assert accuracy(tmp_path, "runs/a") > 0.8


@pytest.mark.parametrize("way", ["scaled", "standardised", "last", "double"])
def test_files_pass_what_the_source_declares(tmp_path, way):
    source, processor = opened(tmp_path, way)
    with pytest.raises(DataError, match=r"not what a file gives, pixels uint8 \[1, 8, 8\].* Write prepare"):
        reader_of(source.spec, processor)
    source, processor = opened(tmp_path, way, "prepare")
    file = tmp_path / "a.png"
    Image.fromarray(source.image[3][0]).save(file)
    found, expected = reader_of(source.spec, processor)(file, "a.png"), source.__getitems__([3])["image"][0]
    assert found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.mark.parametrize("form", ["image", "array", "tensor"])
def test_a_source_may_crop_images_of_any_size(tmp_path, form):
    """As training does, and not scaled without their proportions."""
    file, made = (
        tmp_path / "own.py",
        {"image": "image", "array": "np.array(image)[None]", "tensor": "torch.tensor(np.array(image))[None]"},
    )
    crop = (
        f"\nimport torch\ndef prepare_image(image):\n    image = image.crop((4, 0, 12, 8))\n    return {made[form]}\n"
    )
    file.write_text(FILE.format(way="plain", name="convert", call="convert") + crop)
    trust.own(trust.code_with_imports(file))
    config = Config(kind="user", file=file)
    source, processor = _user.build(config, "test"), processor_of(config)
    wide = np.random.default_rng(0).integers(256, size=(8, 20), dtype=np.uint8)
    Image.fromarray(wide).save(tmp_path / "a.png")
    found = reader_of(source.spec, processor)(tmp_path / "a.png", "a.png")
    assert found.dtype == np.uint8 and np.array_equal(found, wide[None, :, 4:12])


def test_a_source_that_does_not_call_it_is_told(tmp_path):
    with pytest.raises(DataError, match=r"makes float32 .* gives uint8 .* call prepare\(\) in source"):
        opened(tmp_path, "scaled", "prepare", call="np.asarray")


def test_its_errors_name_the_file_and_texts_are_prepared(tmp_path):
    lower = Preparation(tmp_path / "own.py", str.lower)
    assert lower.texts(["Ab", ["C", "d"]]) == ["ab", ["C", "d"]]
    with pytest.raises(DataError, match=r"prepare\(\) in .*own.py fails for x: TypeError"):
        lower(1, "x")


def accuracy(tmp_path, model):
    out = tmp_path / f"{model.replace('/', '-')}.csv"
    done = lockstep(tmp_path, "predict", model, "pictures", "--out", out.name)
    if done.returncode:
        return done.stdout + done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    return sum(row["file"][0] == row["label"] for row in rows) / len(rows)


def test_a_run_and_its_export_predict_files_as_well_as_samples(tmp_path):
    write_pictures(tmp_path)
    (tmp_path / "both.py").write_text(FILE.format(way="standardised", name="prepare", call="prepare"))
    (tmp_path / "undeclared.py").write_text(FILE.format(way="standardised", name="convert", call="convert"))
    sections = {"optim": {"lr": 0.01}, "train": {"epochs": 5, "global_batch": 32}, "launch": {"processes": 1}}
    found = {}
    for name in ("both", "undeclared"):
        own = {"kind": "user", "file": f"{name}.py"}
        (tmp_path / "c.yaml").write_text(json.dumps({"data": own, "model": own, **sections}))
        done = lockstep(tmp_path, "train", "c.yaml", f"run.name={name}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("files cannot be predicted" in " ".join(done.stdout.split())) == (name == "undeclared")
        found[name] = summary(tmp_path, name)["evaluation"]["accuracy"]
    assert found["both"] == found["undeclared"] > 0.8
    assert "Write prepare(pixels)" in " ".join(accuracy(tmp_path, "runs/undeclared").split())
    assert lockstep(tmp_path, "export", "runs/both").returncode == 0
    assert accuracy(tmp_path, "runs/both") == accuracy(tmp_path, "runs/both/export") == pytest.approx(found["both"])
