"""The source of one's own files, and what it shares with others: images of any form, labels of any form."""

import pytest
from PIL import Image
from table_files import complaint, files_config, write_table

from lockstep.base.errors import DataError
from lockstep.data import columns as tables
from lockstep.data import data_config, images
from lockstep.data.sources import _files as files

WORDS = [("good", "yes"), ("bad", "no"), ("fine", "yes"), ("awful", "no")]


def picture(height=4, width=6, *, value=100, mode="RGB"):
    return Image.new(mode, (width, height), value if mode in ("L", "I;16") else (value,) * len(mode))


def write_pictures(root, names, **form):
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(value=number, **form).save(root / name)
    return root


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet", ".CSV"])
def test_files_reads_tables(tmp_path, suffix):
    config = files_config(tmp_path / f"a{suffix}", test=tmp_path / f"b{suffix}")
    assert config.modality == "text"
    write_table(config.train, [("NA", "10"), ('a, "b"', "9"), ("c", "9")])
    write_table(config.test, [("007", "9")])
    assert config.modality == "text"
    train, test = (files.build(config, split) for split in ("train", "test"))
    assert train.texts == ["NA", 'a, "b"', "c"]
    assert train.labels.tolist() == [1, 0, 0]
    assert test.spec.labels == train.spec.labels == ("9", "10")
    assert (test.texts, test.labels.tolist()) == (["007"], [0])


def test_files_keeps_long_texts_with_line_ends(tmp_path):
    long = "word\n" * 500_000
    path = write_table(tmp_path / "a.csv", [(long, "x"), ("b", "y")])
    assert files.build(files_config(path, test=path), "train").texts == [long, "b"]


def test_files_holds_out_the_same_samples_whatever_they_are(tmp_path):
    config = files_config(write_table(tmp_path / "a.jsonl", [(f"text {n}", n % 3) for n in range(1000)]))
    train, test = (files.build(config, split) for split in ("train", "test"))
    assert sorted(train.texts + test.texts) == sorted(f"text {n}" for n in range(1000))
    assert 70 < len(test) < 130
    assert train.spec == test.spec
    other = files_config(write_table(tmp_path / "b.csv", [(f"text {n}", "x") for n in range(500)]))
    assert files.build(other, "test").texts == [text for text in test.texts if int(text[5:]) < 500]
    wider = files.build(config.model_copy(update={"test_fraction": 0.3}), "test")
    assert set(test.texts) < set(wider.texts)


@pytest.mark.parametrize(
    ("suffix", "content", "says"),
    [
        (".csv", b"body,label\na,1\n", "no column 'text'"),
        (".csv", b"body,label\na,1\n", "(body, label)"),
        (".csv", b"text,text,label\na,b,1\n", "2 columns named 'text'"),
        (".csv", b"text,label\na,1\nb,2,3\n", "Expected 2 columns, got 3"),
        (".csv", b"text,label\n\xff,1\n", "invalid UTF8 data. Save it as UTF-8"),
        (".jsonl", b'{"text": "\xff", "label": 1}', "Save it as UTF-8"),
        (".csv", "text,label\na,1\n".encode("utf-16"), "UTF-16. Save it as UTF-8"),
        (".jsonl", '{"text": "a", "label": 1}'.encode("utf-16"), "UTF-16. Save it as UTF-8"),
        (".csv", b"text,label\na,1\nb,\n", "row 2 of"),
        (".csv", b"text,label\n", "no sample"),
        (".csv", b"", "Empty CSV file"),
        (".jsonl", b'{"text": "a", "label": 1}\n{"text"\n', "line 2"),
        (".jsonl", b'{"text": "a", "label": 1}\n{"text": "b"}\n', "line 2"),
        (".jsonl", b'{"text": null, "label": 1}\n', "has no text"),
        (".jsonl", b'{"text": "a", "label": NaN}\n', "has no label"),
        (".jsonl", b"[1]\n", "not an object"),
        (".jsonl", b"", "no sample"),
        (".parquet", b"PAR1", "cannot be read as parquet"),
        (".txt", b"a", ".csv, .tsv, .jsonl, .parquet"),
    ],
)
def test_files_names_what_is_wrong_with_a_table(*, tmp_path, suffix, content, says):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    message = complaint(files.build, files_config(path))
    assert says in message
    assert str(path) in message


@pytest.mark.parametrize("separator", [";", "\t", "|", ","])
def test_files_reads_a_csv_with_the_separator_that_it_has(tmp_path, separator):
    rows = ["text,label", '"good, isn\'t it; yes|no",1', "bad,0"]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(separator.join(row.rsplit(",", 1)) for row in rows))
    found = files.build(files_config(path, test=path), "train")
    assert found.texts == ["good, isn't it; yes|no", "bad"]
    assert found.spec.labels == ("0", "1")


def test_files_names_what_does_not_fit_together(tmp_path):
    train = write_table(tmp_path / "train.csv", WORDS)
    test = write_table(tmp_path / "test.csv", [("x", "yes"), ("y", "maybe")])
    message = complaint(files.build, files_config(train, test=test), "test")
    assert f"row 2 of {test} has the label 'maybe', which no training sample has (no, yes)" in message
    folder = write_pictures(tmp_path / "pictures", ["a/1.png"])
    assert "of one kind" in complaint(files.build, files_config(train, test=folder), "test")
    assert "there is no file or folder" in complaint(files.build, files_config(tmp_path / "none.csv"))
    assert "change data.test_fraction" in complaint(files.build, files_config(train, test_fraction=1e-9), "test")
    assert "no sample to train on" in complaint(files.build, files_config(train, test_fraction=1 - 1e-9))


def test_files_reads_folders_of_images(tmp_path):
    names = ["10/b.PNG", "9/deep/a.png", "9/.hidden.png", "10/a.bmp", ".git/x/1.png"]
    root = write_pictures(tmp_path / "train", names)
    (root / "9" / "notes.txt").write_text("not an image")
    write_pictures(tmp_path / "test", ["9/1.png"], height=8, width=12)
    config = files_config(root, test=tmp_path / "test")
    assert config.modality == files_config(tmp_path / "later").modality == "image"
    train = files.build(config, "train")
    assert train.spec.labels == ("9", "10")
    assert train.images[:, 0, 0, 0].tolist() == [3, 0, 1]
    assert train.labels.tolist() == [1, 1, 0]
    assert train.images.shape == (3, 3, 4, 6)
    assert f"{tmp_path / 'test' / '9' / '1.png'} is 8 x 12" in complaint(files.build, config, "test")
    scaled = files.build(config.model_copy(update={"image_size": (4, 6)}), "test")
    assert scaled.spec == train.spec


def test_files_names_what_is_wrong_with_a_folder(tmp_path):
    assert "no images in folders" in complaint(files.build, files_config(tmp_path))
    (tmp_path / "cat").mkdir()
    broken = tmp_path / "cat" / "1.png"
    for content in (b"", b"text"):
        broken.write_bytes(content)
        assert f"{broken} cannot be read as an image" in complaint(files.build, files_config(tmp_path, test=tmp_path))
    picture(40, 40).save(broken)
    broken.write_bytes(broken.read_bytes()[:-30])
    assert f"{broken} cannot be read as an image" in complaint(files.build, files_config(tmp_path, test=tmp_path))


# ---- images and labels


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("L", 77, 77),
        ("RGB", 77, 77),
        ("RGBA", 77, 77),
        ("LA", 77, 77),
        ("I;16", 77 * 256 + 200, 77),
        ("1", 1, 255),
    ],
)
def test_images_of_any_mode_become_bytes(*, tmp_path, mode, value, expected):
    path = tmp_path / "a.png"
    picture(mode=mode, value=value).save(path)
    for channels in (1, 3):
        section = data_config.ImageSection(kind="x", channels=channels)
        for file in (path, path.read_bytes()):
            found, _ = images.decode([file], 1, section, like=[file], place=str)
            assert found.shape == (1, channels, 4, 6)
            assert (found == expected).all()


def test_photos_are_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(4, 6).save(tmp_path / "a.jpg", exif=exif)
    section = data_config.ImageSection(kind="x")
    assert images.decode([tmp_path / "a.jpg"], 1, section, like=[tmp_path / "a.jpg"], place=str)[0].shape == (
        1,
        3,
        6,
        4,
    )
    with pytest.raises(DataError, match="row 1 of x has no image"):
        images.decode([None], 1, section, like=[tmp_path / "a.jpg"], place=tables.rows_of("x"))


def test_classes_are_sorted_as_numbers_if_they_are():
    assert tables.names_of(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert tables.names_of(["10", "9", "a"]) == ("10", "9", "a")
    assert tables.names_of(["nan", "inf", "1"]) == ("1", "inf", "nan")
    assert tables.labels_of([1, 1.0, "1", True, 1.5], str) == ["1", "1", "1", "True", "1.5"]
