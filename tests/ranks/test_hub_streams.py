"""Streams of the library datasets: the samples of their files, read while training."""

import numpy as np
import pytest
from PIL import Image
from training_runs import config_in, run_on_rank

from lockstep.base.errors import DataError
from lockstep.data.dataset import open_source, stream_of, with_tokens
from lockstep.data.sources import hub

LABELS = ["no", "yes"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four Parquet files of texts and images, and one of test samples."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("shards")
    columns = {
        "text": datasets.Value("string"),
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=LABELS),
        "number": datasets.Value("int64"),
        "many": datasets.List(datasets.ClassLabel(names=LABELS)),
    }
    for shard in range(4):
        rows = []
        for number in range(25 * shard, 25 * shard + 25):
            pixels = np.random.default_rng(number).integers(0, 256, (6, 6), dtype=np.uint8)
            row = {"text": f"text {number}", "image": Image.fromarray(pixels), "label": number % 2}
            rows.append(row | {"number": number, "many": [0, 1][: number % 3]})
        table = datasets.Dataset.from_list(rows, features=datasets.Features(columns))
        table.to_parquet(folder / f"train-{shard:05}-of-00004.parquet")
        if not shard:
            table.to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


def section_of(shards, **more):
    return hub.Config(kind="hub", name=str(shards), **more)


@pytest.mark.parametrize(
    "columns",
    [
        {"text_column": "text"},
        {"text_column": "text", "label_column": "number", "labels": "number"},
        {"text_column": "text", "label_column": "many", "labels": "classes"},
        {"image_column": "image", "channels": 1},
        {"image_column": "image", "image_size": (3, 4)},
    ],
)
def test_a_stream_of_datasets_gives_the_samples_of_its_files(shards, columns):
    rows = [0, 24, 25, 99]
    for split in ("train", "test"):
        whole = open_source(section_of(shards, **columns), split)
        stream = open_source(section_of(shards, **columns, streaming=True), split)
        assert stream.spec == whole.spec
        places = [row % len(whole) for row in rows]
        expected, found = (collate_texts(source.__getitems__(places)) for source in (whole, stream))
        assert expected == found


def collate_texts(columns):
    return {name: np.array(column).tolist() for name, column in columns.items()}


def test_texts_of_a_stream_are_tokenized_as_they_come(shards):
    class Lengths:
        key, pad_id = "lengths", 0

        def __call__(self, texts):
            return [np.arange(len(text), dtype=np.int32) for text in texts]

    section = section_of(shards, text_column="text", streaming=True)
    tokens = with_tokens(open_source(section, "train"), section, Lengths())
    columns = tokens.__getitems__([5, 99])
    assert list(columns) == ["input_ids", "label"]
    assert [len(row) for row in columns["input_ids"]] == [6, 7]
    assert stream_of(tokens) is not None and tokens.lengths is None


def test_what_cannot_be_streamed_is_told(shards):
    with pytest.raises(DataError, match="'number' of .* does not name its classes, and a stream is not read before"):
        open_source(section_of(shards, text_column="text", label_column="number", streaming=True), "train")
    with pytest.raises(DataError, match="has no column 'txt'"):
        open_source(section_of(shards, text_column="txt", streaming=True), "train")


def test_shards_of_datasets_are_streamed(ranks, shards, tmp_path):
    data = {"kind": "hub", "name": str(shards), "image_column": "image", "streaming": True, "limit": None}
    sections = {"train": {"epochs": None, "steps": 9, "global_batch": 16, "micro_batch": 4}, "evaluate": {"limit": 20}}
    found = []
    for world, number in ((1, 0), (2, 2)):
        more = {"workers": number, "shuffle_block": 40}
        found.append(ranks(world, run_on_rank, config_in(tmp_path, f"{world}", data=data | more, **sections))[0])
    assert len({each["digest"] for each in found}) == 1, found
    assert found[0]["evaluation"] == found[1]["evaluation"]
