"""The sources of named data sets on real small files: both splits, and every complaint they can have."""

import csv
import hashlib
import json
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer

import datasets
import numpy as np
import pydantic
import pytest
from data_files import idx, write_mnist
from PIL import Image
from places import DATA

from lockstep.base.contracts import Source
from lockstep.base.errors import DataError
from lockstep.data import huggingface
from lockstep.data.sources import _ag_news as ag_news
from lockstep.data.sources import _hub as hub
from lockstep.data.sources import _mnist as mnist

needs_shared = pytest.mark.skipif(not DATA.is_dir(), reason="real MNIST and AG News are not at hand")


@pytest.fixture
def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def serve():
    """Start an HTTP server on loopback with a handler; returns its address."""
    servers = []

    def start(handler):
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path, closed_port):
    """A hub that refuses connections, and a cache of the test's own."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(mnist, "MIRRORS", (f"http://127.0.0.1:{closed_port}/", f"http://127.0.0.1:{closed_port}/b/"))


def complaint(build, config, split="train"):
    with pytest.raises(DataError) as caught:
        build(config, split)
    message = str(caught.value)
    assert "\n" not in message.strip()
    return message


# ---- MNIST


def mnist_config(root):
    return mnist.Config(kind="mnist", root=root)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", ["mnist", "."])
def test_mnist_reads_both_splits(tmp_path, packed, folder):
    write_mnist(tmp_path / folder, packed=packed)
    train, test = (mnist.build(mnist_config(tmp_path), split) for split in ("train", "test"))
    assert isinstance(train, Source)
    assert (len(train), len(test)) == (5, 3)
    assert train.spec.image_shape == (1, 28, 28)
    assert train.spec.labels == tuple("0123456789")
    expected = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    batch = train.__getitems__([4, 1])
    assert np.array_equal(batch["image"], expected[[4, 1], None])
    assert batch["label"].tolist() == [4, 1]


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (
            "train-images-idx3-ubyte",
            lambda data: data[:-1],
            "3935 bytes long unpacked, but its header says 3936",
        ),
        ("train-images-idx3-ubyte", lambda data: data[:10], "does not begin"),
        ("train-images-idx3-ubyte", lambda data: b"", "does not begin"),
        ("train-images-idx3-ubyte", lambda data: b"<html>" * 900, "does not begin"),
        ("train-images-idx3-ubyte", lambda _: idx(np.zeros((5, 8, 8), np.uint8), 2051), "8x8, not 28x28"),
        ("train-labels-idx1-ubyte", lambda data: data + b"\0", "its header says 13"),
        ("train-labels-idx1-ubyte", lambda _: idx(np.zeros(4, np.uint8), 2049), "5 images, but"),
        ("train-labels-idx1-ubyte", lambda _: idx(np.full(5, 10, np.uint8), 2049), "holds the label 10"),
    ],
)
def test_mnist_names_the_damaged_file(*, tmp_path, name, damage, says):
    write_mnist(tmp_path, packed=False)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    message = complaint(mnist.build, mnist_config(tmp_path))
    assert says in message
    assert name in message


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-20], lambda data: b"not packed", lambda data: data[:30] + b"x" * 30]
)
def test_mnist_names_a_damaged_archive(tmp_path, damage):
    write_mnist(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path} cannot be read" in complaint(mnist.build, mnist_config(tmp_path), "test")


def test_mnist_fetches_what_is_missing_and_keeps_what_is_there(*, tmp_path, monkeypatch, serve, closed_port):
    write_mnist(tmp_path / "official")
    address = serve(partial(SimpleHTTPRequestHandler, directory=tmp_path / "official"))
    monkeypatch.setattr(mnist, "MIRRORS", (f"http://127.0.0.1:{closed_port}/", address))
    sums = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in (tmp_path / "official").iterdir()}
    assert sums.keys() == mnist.MD5.keys()
    monkeypatch.setattr(mnist, "MD5", sums)
    own = tmp_path / "data" / "mnist" / "t10k-labels-idx1-ubyte"
    own.parent.mkdir(parents=True)
    own.write_bytes(idx(np.array([7, 8, 9], dtype=np.uint8), 2049))
    config = mnist_config(tmp_path / "data")
    assert len(mnist.build(config, "train")) == 5
    assert mnist.build(config, "test").labels.tolist() == [7, 8, 9]
    assert len(list(own.parent.iterdir())) == 4


def test_mnist_refuses_a_download_with_another_checksum(tmp_path, monkeypatch, serve):
    write_mnist(tmp_path / "other")
    address = serve(partial(SimpleHTTPRequestHandler, directory=tmp_path / "other"))
    monkeypatch.setattr(mnist, "MIRRORS", (address,))
    assert "does not match the known hash" in complaint(mnist.build, mnist_config(tmp_path / "data"))
    assert list((tmp_path / "data" / "mnist").iterdir()) == []


def test_mnist_offline_says_which_files_go_where(tmp_path):
    message = complaint(mnist.build, mnist_config(tmp_path))
    assert all(name in message for name in mnist.MD5)
    assert str(tmp_path / "mnist") in message
    assert message.count("cannot be reached") == 2


@needs_shared
def test_real_mnist():
    train, test = (mnist.build(mnist_config(DATA), split) for split in ("train", "test"))
    assert (len(train), len(test)) == (60_000, 10_000)
    assert hashlib.md5(idx(train.images[:, 0], 2051)).hexdigest() == "6bbc9ace898e44ae57da46a324031adb"


# ---- AG News


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return path


def ag_config(root):
    return ag_news.Config(kind="ag_news", root=root)


@pytest.mark.parametrize("folder", ["ag_news", "."])
def test_ag_news_joins_title_and_description(tmp_path, folder):
    write_csv(tmp_path / folder / "train.csv", [[3, "Oil", 'is "up",\nagain'], [1, "", "Peace"], [4, "Chips", ""]])
    write_csv(tmp_path / folder / "test.csv", [[2, "Goal", "é"]])
    (tmp_path / folder / "classes.txt").write_text("World\nSports\nBusiness\nSci/Tech\n\n")
    train, test = (ag_news.build(ag_config(tmp_path), split) for split in ("train", "test"))
    assert train.texts == ['Oil is "up",\nagain', "Peace", "Chips"]
    assert train.labels.tolist() == [2, 0, 3]
    assert train.spec.labels == ("World", "Sports", "Business", "Sci/Tech")
    assert test.__getitems__([0])["text"] == ["Goal é"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'"1","a","b"\n"5","a","b"\n', "row 2 of"),
        (b'"1","a"\n', "row 1 of"),
        (b'"1","a","b\n', "is damaged after row 0"),
        (b'"1","a","\xff"\n', "is damaged after row"),
        (b"", "is empty"),
    ],
)
def test_ag_news_names_the_damaged_row(tmp_path, content, says):
    (tmp_path / "train.csv").write_bytes(content)
    message = complaint(ag_news.build, ag_config(tmp_path))
    assert says in message
    assert str(tmp_path / "train.csv") in message


def test_ag_news_refuses_other_classes(tmp_path):
    write_csv(tmp_path / "train.csv", [[1, "a", "b"]])
    (tmp_path / "classes.txt").write_text("Cats\nDogs\n")
    assert "classes Cats, Dogs" in complaint(ag_news.build, ag_config(tmp_path))


def test_ag_news_offline_says_which_files_go_where(tmp_path):
    message = complaint(ag_news.build, ag_config(tmp_path))
    assert "train.csv and test.csv" in message
    assert str(tmp_path / "ag_news") in message
    assert not datasets.config.HF_HUB_OFFLINE


@needs_shared
def test_real_ag_news():
    train, test = (ag_news.build(ag_config(DATA), split) for split in ("train", "test"))
    assert (len(train), len(test)) == (4_990, 7_600)
    assert min(map(len, test.texts)) > 10


# ---- hub


def hub_config(name, **settings):
    return hub.Config(kind="hub", name=str(name), **settings)


def write_parquet(path, rows, **features):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features) if features else None)
    table.to_parquet(path)


def picture(height, width, value=100):
    return Image.new("RGB", (width, height), (value,) * 3)


def test_hub_reads_a_folder_of_csv(tmp_path):
    write_csv(tmp_path / "set" / "train.csv", [["body", "stars"], ["a", 10], ["b", 9], ["c", 9]])
    write_csv(tmp_path / "set" / "test.csv", [["body", "stars"], ["d", 10]])
    config = hub_config(tmp_path / "set", text_column="body", label_column="stars")
    assert config.modality == "text"
    train, test = (hub.build(config, split) for split in ("train", "test"))
    assert train.spec.labels == test.spec.labels == ("9", "10")
    assert train.labels.tolist() == [1, 0, 0]
    assert test.__getitems__([0]) == {"text": ["d"], "label": [1]}


def test_hub_reads_images_and_class_names(tmp_path):
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])}
    write_parquet(
        tmp_path / "set" / "train.parquet",
        {"image": [picture(4, 6, 9)] * 10, "label": [0, 1] * 5},
        **features,
    )
    config = hub_config(
        tmp_path / "set",
        image_column="image",
        channels=1,
        train_split="train[:70%]",
        test_split="train[70%:]",
    )
    assert config.modality == "image"
    train, test = (hub.build(config, split) for split in ("train", "test"))
    assert (len(train), len(test)) == (7, 3)
    assert train.spec.labels == ("dog", "cat")
    assert train.images.shape == (7, 1, 4, 6)
    assert (train.images == 9).all()
    scaled = hub.build(config.model_copy(update={"image_size": (2, 5), "channels": 3}), "test")
    assert scaled.images.shape == (3, 3, 2, 5)


@pytest.mark.parametrize(
    ("settings", "split", "says"),
    [
        ({"image_column": "image"}, "train", "data.image_size='[4,6]'"),
        ({"image_column": "text"}, "train", "not images"),
        ({"text_column": "txt"}, "train", "(image, text, number, secret, many)"),
        ({"text_column": "text"}, "train", "split train has no text"),
        ({"text_column": "number"}, "train", "has 2 for a text"),
        ({"text_column": "text", "label_column": "text"}, "train", "split train has no label"),
        ({"text_column": "text", "label_column": "secret"}, "train", "split train is not labelled"),
        ({"text_column": "text", "label_column": "many"}, "train", "one text or one number"),
        ({"text_column": "text"}, "test", "['train']"),
        ({"text_column": "text", "subset": "x"}, "train", "'default'"),
        (
            {"text_column": "text", "train_split": "train[:1]", "test_split": "train[1:]"},
            "test",
            "label '3', which",
        ),
    ],
)
def test_hub_names_what_is_wrong_with_the_data(*, tmp_path, settings, split, says):
    rows = {
        "image": [picture(4, 6), picture(5, 6)],
        "text": ["a", None],
        "number": [2, 3],
        "secret": [0, -1],
        "many": [[1], [2]],
    }
    features = {
        "image": datasets.Image(),
        "text": datasets.Value("string"),
        "number": datasets.Value("int64"),
        "secret": datasets.ClassLabel(names=["x"]),
        "many": datasets.List(datasets.Value("int64")),
    }
    write_parquet(tmp_path / "set" / "train.parquet", rows, **features)
    assert says in complaint(hub.build, hub_config(tmp_path / "set", **{"label_column": "number", **settings}), split)


def test_hub_wants_one_column_of_samples():
    for columns in ({}, {"text_column": "a", "image_column": "b"}):
        with pytest.raises(pydantic.ValidationError, match="exactly one of text_column and image_column"):
            hub_config("x", **columns)


def test_hub_offline_uses_its_cache_or_says_so(tmp_path):
    config = hub_config("owner/reviews", text_column="text")
    assert "cannot be reached for the data set 'owner/reviews'" in complaint(hub.build, config)
    write_parquet(tmp_path / "reviews" / "train.parquet", {"text": ["a", "b"], "label": ["x", "y"]})
    hub.build(hub_config(tmp_path / "reviews", text_column="text"), "train")
    made = next((tmp_path / "cache").glob("*/*/*/*/dataset_info.json")).parent
    kept = tmp_path / "cache" / "owner___reviews" / "default" / "0.0.0" / "0123456789abcdef"
    kept.parent.mkdir(parents=True)
    made.rename(kept)
    info = json.loads((kept / "dataset_info.json").read_text())
    (kept / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "reviews", "config_name": "default"}))
    next(kept.glob("*.arrow")).rename(kept / "reviews-train.arrow")
    assert hub.build(config, "train").texts == ["a", "b"]
    assert not datasets.config.HF_HUB_OFFLINE


class EmptyHub(BaseHTTPRequestHandler):
    """A hub that answers, and knows nothing."""

    def do_HEAD(self):
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


def test_hub_says_that_it_does_not_know_a_name(monkeypatch, serve):
    address = serve(EmptyHub).rstrip("/")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
    monkeypatch.setattr(huggingface, "hub_answers", lambda: True)  # it would ask the real one
    message = complaint(hub.build, hub_config("owner/nothing", text_column="text"))
    assert "'owner/nothing' doesn't exist on the Hub" in message
