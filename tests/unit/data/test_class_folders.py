"""Folders of class folders, and labels of tables, as strangers have them: read, or told, or refused; never silent."""

import numpy as np
import pytest
from PIL import Image

from lockstep.base.errors import DataError
from lockstep.base.events import Warned
from lockstep.data.columns import names_of
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import prepare_splits

SIZE = 6


def pictures(folder, count=12, suffix="png"):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.full((SIZE, SIZE), 10 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.{suffix}", format="JPEG" if suffix == "jfif" else None)


def opened(train, model=None, **data):
    """Both splits, and the messages to the user."""
    told = []
    data = {"kind": "files", "train": train, "test_fraction": 0.2, "channels": 1, **data}
    recipe = Recipe.model_validate({"data": data, "model": model or {"kind": "cnn"}})
    splits = prepare_splits(recipe, lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    return splits, told


@pytest.fixture
def folder(tmp_path):
    for name in ("cat", "dog"):
        pictures(tmp_path / "data" / name)
    return tmp_path / "data"


def refusal(folder, **settings):
    with pytest.raises(DataError) as found:
        opened(folder, **settings)
    return str(found.value)


@pytest.mark.parametrize("suffix", ["tif", "TIFF", "gif", "jfif", "ppm", "tga", "webp"])
def test_forms_that_pillow_reads(folder, suffix):
    pictures(folder / "owl", suffix=suffix)
    splits, told = opened(folder)
    assert splits.train.spec.labels == ("cat", "dog", "owl")
    assert len(splits.train) + len(splits.test) == 36
    assert not told
    values = {
        int(image.mean()) // 9 for split in (splits.train, splits.test) for image in split.images[split.labels == 2]
    }
    assert len(values) >= 10  # not twelve copies of one


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_numbers_without_a_scale_are_refused(folder, dtype):
    """They were black, or nearly."""
    Image.fromarray(np.full((SIZE, SIZE), 1, dtype=dtype)).save(folder / "cat" / "20.tif")
    assert "20.tif cannot be read as an image (its numbers have 32 bits" in refusal(folder)


def test_what_is_left_out_is_told_once(folder):
    for name in (".ipynb_checkpoints", "__MACOSX/cat", "cat/.ipynb_checkpoints", "dog/@eaDir", ".git"):
        pictures(folder / name, 2 if name != ".git" else 0)
    pictures(folder, 3)
    for name in ("notes.txt", "1.heic", "2.HEIC", "Thumbs.db", ".DS_Store", "._1.png"):
        (folder / "cat" / name).write_bytes(b"x")
    splits, told = opened(folder)
    assert splits.train.spec.labels == ("cat", "dog")
    assert len(splits.train) + len(splits.test) == 24
    (message,) = told
    assert message == (
        f"{folder}: left out: hidden and system folders (.ipynb_checkpoints, @eaDir, __MACOSX); "
        "3 of other kinds (.heic, .txt); 3 images in no folder of a class"
    )


def test_an_empty_class_is_refused_where_it_is_learned(folder, tmp_path):
    (folder / "owl").mkdir()
    assert f"{folder / 'owl'} holds none of the images that are read" in refusal(folder)
    (folder / "owl" / "1.heic").write_bytes(b"x")
    assert f"{folder / 'owl'} holds none" in refusal(folder)
    for name in ("cat", "dog", "owl"):
        pictures(tmp_path / "whole" / name)
    splits, _ = opened(tmp_path / "whole", test=folder)  # no owl to test on
    assert splits.test.spec.labels == ("cat", "dog", "owl")
    assert sorted(set(splits.test.labels.tolist())) == [0, 1]


@pytest.mark.parametrize("names", [("train", "test"), ("Train", "val", "test"), ("training", "validation")])
def test_splits_are_no_classes(tmp_path, names):
    for name in names:
        pictures(tmp_path / name / "cat")
        pictures(tmp_path / name / "dog")
    train = tmp_path / names[0]
    assert f"set data.train={train} and data.test={tmp_path}" in refusal(tmp_path)
    assert opened(train, test=tmp_path / names[-1])[0].train.spec.labels == ("cat", "dog")


def test_folders_with_numbers_for_names_keep_them(tmp_path):
    """The class in folder 10 is number 2, and its name remains 10."""
    for name in ("0", "1", "2", "10", "100"):
        pictures(tmp_path / name, 5)
        Image.fromarray(np.full((SIZE, SIZE), 200 + int(name) // 2, dtype=np.uint8)).save(tmp_path / name / "5.png")
    splits, _ = opened(tmp_path, test_fraction=0.2)
    names = splits.train.spec.labels
    assert sorted(names, key=int) == ["0", "1", "2", "10", "100"]
    for split in (splits.train, splits.test):
        for image, label in zip(split.images, split.labels, strict=True):
            assert image.max() < 200 or image.max() == 200 + int(names[label]) // 2


def test_one_class_is_nothing_to_learn(folder, tmp_path):
    assert f"data.train={folder}" in refusal(folder.parent)
    pictures(tmp_path / "one" / "train")
    assert "all training samples are of one class, 'train'" in refusal(tmp_path / "one")
    (tmp_path / "a.csv").write_text("text,label\n" + "word,3\n" * 20)
    assert "all training samples are of one class, '3'" in refusal(tmp_path / "a.csv")
    (tmp_path / "net.py").touch()
    _, told = opened(tmp_path / "one", model={"kind": "user", "file": tmp_path / "net.py"})
    assert "of one class" in told[0]  # its loss may need no classes


@pytest.mark.parametrize(
    "labels",
    [
        ("money", "money "),
        ("1", "1.0"),
        ("a b", "a\u00a0 b"),
        ("caf\u00e9", "cafe\u0301"),
        ("01", "1"),
        ("x", "1e3", "1000"),
    ],
)
def test_labels_that_are_written_in_two_ways(labels):
    with pytest.raises(DataError, match="differ in nothing but"):
        names_of(labels)


def test_labels_that_differ(tmp_path):
    assert names_of(["1", "1.5", "-1", "x1", "x 1"]) == ("-1", "1", "1.5", "x 1", "x1")
    (tmp_path / "a.csv").write_text("text,label\n" + "word,Co\nword,CO\nword,ZO\n" * 9)
    _, told = opened(tmp_path / "a.csv")
    assert told == ["'CO' and 'Co' are two classes, which differ only in case"]
