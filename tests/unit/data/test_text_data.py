"""Plain text for language models: its pieces, its tokens, its samples, and what is said of paths without text."""

import io
import itertools
import os
import pydoc_data.topics
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from running import lockstep

from lockstep.base.errors import DataError
from lockstep.data.dataset import with_tokens
from lockstep.data.packing import BEGIN, END, Windows
from lockstep.data.sources import _text as source
from lockstep.data.sources.text import Config
from lockstep.data.text_tokenizers import open_tokenizer
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import open_splits

WIDE = "aé€😀"
"""Characters of one to four bytes."""


def opened(split="train", **settings):
    return source.build(Config(kind="text", **settings), split)


def whole(path):
    """All pieces of a path."""
    other = path.parent / "other.txt"
    other.write_text("something else\n")
    return opened(train=path, test=other)


def texts(pieces):
    """Without BEGIN, which stands at the first and behind each that ends."""
    found = pieces.__getitems__(range(len(pieces)))["text"]
    assert [each.startswith(BEGIN) for each in found] == [True, *(each.endswith(END) for each in found[:-1])]
    return [each.removeprefix(BEGIN) for each in found]


def lines_of(generator, count, longest):
    return ["".join(generator.choice(list(WIDE), generator.integers(0, longest))) for _ in range(count)]


def written(path, text):
    path.write_bytes(text.encode())
    return path


def random_text(seed):
    """Lines of any length up to several pieces, with any ending, or none at the end."""
    generator = np.random.default_rng(seed)
    ending = ["\n", "\r\n", "\r"][seed % 3]
    longest = [40, 3000, 40_000][seed // 3 % 3]
    return ending.join(lines_of(generator, 90_000 // longest + 3, longest)) + ending * (seed % 2)


CASES = {
    "a byte": "x",
    "a line end": "\n",
    "as long as a piece": "x" * source.MOST,
    "as long as a piece, and a line end": "x" * source.MOST + "\n",
    "as long as two pieces": "x" * 2 * source.MOST,
    "lines": "a line of text\n" * 5000,
    "lines of Windows": "a line of text\r\n" * 5000,
    "no line end at the end": "a line of text\n" * 5000 + "end",
    "empty lines": "\n" * 50_000,
    **{f"a long line, {shift} further": "x" * shift + "😀" * 30_000 for shift in range(4)},
    **{f"a long line of three bytes, {shift} further": "x" * shift + "€" * 30_000 for shift in range(3)},
    **{f"random {seed}": random_text(seed) for seed in range(18)},
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_pieces_hold_every_character_once_and_break_at_lines(tmp_path, text):
    pieces = whole(written(tmp_path / "a.txt", text))
    found = texts(pieces)
    assert found[-1].endswith(END) and not any(END in each for each in found[:-1])
    found[-1] = found[-1].removesuffix(END)
    assert "".join(found) == text
    assert pieces.table[0, 1] == 0 and (pieces.table[1:, 1] == pieces.table[:-1, 2]).all()
    for each in found[:-1]:
        size = len(each.encode())
        assert source.MOST <= size <= 2 * source.MOST
        assert each.endswith("\n") or "\n" not in each.encode()[source.MOST :].decode("utf-8", "ignore")


def test_any_piece_is_read_by_itself(tmp_path):
    pieces = whole(written(tmp_path / "a.txt", random_text(3)))
    found = pieces.__getitems__(range(len(pieces)))["text"]
    for indices in ([len(pieces) - 1, 0], np.array([1, 1]), []):
        assert pieces.__getitems__(indices)["text"] == [found[index] for index in indices]


def test_a_folder_is_read_with_its_subfolders(tmp_path):
    folder = tmp_path / "texts"
    for name in ("b.txt", "a.md", "deeper/still/c.py", "UPPER.TXT"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"this is {name}\n")
    (folder / "empty.txt").touch()
    (folder / "deeper" / "picture.png").write_bytes(b"\0\1")
    for hidden in (".git/d.txt", ".hidden.txt", "deeper/.venv/lib/e.py"):
        (folder / hidden).parent.mkdir(parents=True, exist_ok=True)
        (folder / hidden).write_text("not to be read\n")
    found = texts(whole(folder))
    assert found == [f"this is {name}\n{END}" for name in ("UPPER.TXT", "a.md", "b.txt", "deeper/still/c.py")]


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext\n")
    assert texts(whole(tmp_path / "a.txt")) == [f"text\n{END}"]


def test_no_character_of_a_file_ends_a_text(tmp_path):
    """U+FFFF, which stands for the end of a text, is valid in UTF-8."""
    text = "x" * (source.MOST - 3) + "\uffff" + "y" * 10
    assert "".join(texts(whole(written(tmp_path / "a.txt", text)))) == text.replace("\uffff", "\ufffd") + END


LATIN = "Zürich\n".encode("latin1") * 300


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot read {path}: there is no such file or folder"),
        (lambda path: path.touch(), "{path} holds no text: name a text file, or a folder with files that end in .txt"),
        (lambda path: path.mkdir(), "{path} holds no text: name a text file, or a folder with files that end in .txt"),
        (os.mkfifo, "{path} holds no text"),
        (lambda path: path.write_bytes(bytes(range(256)) * 90), "{path} holds no text but zero bytes"),
        (
            lambda path: path.write_text("text\n" * 900, encoding="utf-16"),
            "zero bytes: leave it out, or if it is UTF-16",
        ),
        (lambda path: path.write_bytes(b"x\n" * 90_000 + b"\0"), "{path} holds no text but zero bytes"),
        (
            lambda path: path.write_bytes(LATIN),
            "{path} is not UTF-8 (byte 2). Save it as UTF-8, for example with `iconv",
        ),
        (lambda path: path.write_text("one line"), "data.train holds too little to hold a part out"),
        (lambda path: path.write_text("a line\n" * 90), " tokens of text, too few for a sample of data.context=512"),
    ],
    ids=["missing", "empty", "folder", "pipe", "binary", "utf-16", "zero", "latin", "line", "short"],
)
def test_what_is_no_text_is_said_in_one_message(tmp_path, make, message):
    """While the splits are opened: before a worker is started."""
    path = tmp_path / "a.txt"
    make(path)
    recipe = recipe_of(tmp_path, train=path, context=512)
    with pytest.raises(DataError) as caught:
        open_splits(recipe)
    assert message.format(path=path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nothing.txt", "bin.txt"])
def test_the_command_says_it_once(tmp_path, name):
    (tmp_path / "bin.txt").write_bytes(b"\0" * 90_000)
    (tmp_path / "c.yaml").write_text(f"data: {{kind: text, train: {name}, cache: cache}}\nmodel: {{kind: gpt}}\n")
    done = lockstep(tmp_path, "train", "c.yaml")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and said.count(name) == 1 and "Traceback" not in said, said


def test_what_is_not_utf_8_is_replaced_on_request(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(LATIN)
    pieces = opened(train=file, test=written(tmp_path / "b.txt", "b"), on_bad_sample="skip")
    assert "".join(texts(pieces)) == "Z\ufffdrich\n" * 300 + END


def recipe_of(folder, *, seed=0, model=None, **data):
    data = {"kind": "text", "cache": str(folder / "cache"), **{name: str(value) for name, value in data.items()}}
    model = {"kind": "gpt", "layers": 1, "width": 16, "heads": 2, **(model or {})}
    return Recipe.model_validate({"run": {"seed": seed}, "data": data, "model": model})


@pytest.mark.parametrize("size", [3_000, 40_000, 3_000_000])
def test_the_held_out_part_is_a_tenth_apart_from_the_rest(tmp_path, size):
    """Of short texts, too: their pieces are shorter."""
    text = "".join(f"line {number} of a text\n" for number in range(size // 20))
    file = written(tmp_path / "a.txt", text)
    train, test = (opened(split, train=file) for split in ("train", "test"))
    rows = [*map(tuple, train.table.tolist()), *map(tuple, test.table.tolist())]
    assert len({*rows}) == len(rows)
    covered = sorted(rows)
    assert covered[0][1] == 0 and covered[-1][2] == len(text)
    assert all(one[2] == other[1] for one, other in itertools.pairwise(covered))
    assert sum(len(each) for each in texts(test)) / len(text) == pytest.approx(0.1, abs=0.06)
    lines = [{*"".join(texts(each)).replace(END, "").splitlines()} for each in (train, test)]
    assert not lines[0] & lines[1]


def test_the_held_out_part_is_the_same_for_any_seed(tmp_path):
    written(tmp_path / "a.txt", "".join(f"line {number} of a text\n" for number in range(4000)))
    found = [open_splits(recipe_of(tmp_path, seed=seed, train=tmp_path / "a.txt")) for seed in (0, 1)]
    assert (found[0].test.ids == found[1].test.ids).all()
    assert (found[0].train.ids == found[1].train.ids).all()


def test_the_held_out_part_grows_with_its_fraction(tmp_path):
    written(tmp_path / "a.txt", "a line\n" * 9000)
    sizes = [
        len("".join(texts(opened("test", train=tmp_path / "a.txt", test_fraction=fraction))))
        for fraction in (0.01, 0.1, 0.5, 0.9)
    ]
    assert np.array(sizes) / 63_000 == pytest.approx([0.015, 0.1, 0.5, 0.9], abs=0.03)


def test_what_is_tested_on_is_not_trained_on(tmp_path):
    for name in ("a.txt", "b.txt", "test.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "link").symlink_to(tmp_path / "test.txt")
    train, test = (opened(split, train=tmp_path, test=tmp_path / "link") for split in ("train", "test"))
    assert texts(train) == [f"a.txt\n{END}", f"b.txt\n{END}"] and texts(test) == [f"test.txt\n{END}"]
    with pytest.raises(DataError, match=r"data.test holds all files of data.train: leave it out"):
        opened(train=tmp_path / "a.txt", test=tmp_path)


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_end_stands_wherever_the_text_does_not_go_on(tmp_path, split):
    """Also where the rest of a document is in the other split, so that two documents never run into each other."""
    for number in range(9):
        lines = (f"document {number}, line {line}\n" for line in range(100 + 40 * number))
        written(tmp_path / f"{number}.txt", "".join(lines))
    found = "".join(texts(opened(split, train=tmp_path, test_fraction=0.4)))
    assert found.endswith(END)
    for text in found.removesuffix(END).split(END):
        lines = [line.split() for line in text.splitlines()]
        numbers = [int(line[-1]) for line in lines]
        assert len({line[1] for line in lines}) == 1
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]


def test_the_texts_of_python_itself():
    train, test = (texts(opened(split)) for split in ("train", "test"))
    assert sorted(train + test) == sorted(text + END for text in pydoc_data.topics.topics.values())
    assert len(test) == round(0.1 * len(train + test)) and not {*train} & {*test}


def test_topics_need_no_file(tmp_path):
    splits = open_splits(recipe_of(tmp_path, context=64))
    assert splits.train.spec.vocabulary == 257 and len(splits.train) > 5 * len(splits.test) > 100


def test_a_changed_file_is_tokenized_again(tmp_path):
    file = written(tmp_path / "a.txt", "first\n" * 1000)
    found = []
    for text in ("first\n" * 1000, "other\n" * 1000):
        time.sleep(0.02)
        file.write_text(text)
        found.append(open_splits(recipe_of(tmp_path, train=file)).train.ids[:6].tobytes())
    assert found[0] != found[1]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file of 200 MB with lines of 20 to 200 bytes."""
    file = tmp_path_factory.mktemp("large") / "large.txt"
    generator = np.random.default_rng(0)
    block = "".join("word " * generator.integers(4, 40) + "\n" for _ in range(10_000)).encode()
    with file.open("wb") as out:
        for _ in range(-(-200_000_000 // len(block))):
            out.write(block)
    yield file
    file.unlink()


def test_a_large_file_is_opened_without_reading_it(large):
    """Its pieces take 25 bytes each."""

    def read_bytes():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("rchar")).split()[1])

    before, start = read_bytes(), time.monotonic()
    tracemalloc.start()
    pieces = opened(train=large)
    size, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(pieces) > 10_000
    assert size < 25 * len(pieces) + 20_000 and most < 3_000_000
    assert read_bytes() - before < large.stat().st_size / 20
    assert time.monotonic() - start < 5
    tracemalloc.start()
    assert len(pieces.__getitems__([len(pieces) - 1])["text"][0]) >= 1
    assert tracemalloc.get_traced_memory()[1] < 10 * source.MOST
    tracemalloc.stop()


def test_samples_of_a_billion_tokens_take_no_memory(tmp_path):
    """In a file with a hole; only some tokens in it are set."""
    count, context = 10**9, 1000
    ids = np.memmap(tmp_path / "ids", np.int32, "w+", shape=(count,))
    ids[5_000_000:5_001_001] = np.arange(1001)
    ids[-context - 1 :] = np.arange(context + 1)
    tracemalloc.start()
    start = time.monotonic()
    windows = Windows(SimpleNamespace(ids=ids), np.ones(1001, np.int64), context=context)
    found = windows.__getitems__([5000, 0, len(windows) - 1])
    assert time.monotonic() - start < 0.1
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
    assert len(windows) == (count - 1) // context == 999_999
    assert found["input_ids"].dtype == found["target"].dtype == np.int64
    assert found["input_ids"].tolist() == [[*range(1000)], [0] * 1000, ids[-2000:-1000].tolist()]
    assert found["target"][0].tolist() == [*range(1, 1001)]


@pytest.mark.parametrize(("count", "dropped"), [(5, 0), (6, 1), (8, 3), (9, 0), (100, 3)])
def test_a_sample_is_the_tokens_and_those_that_follow(count, dropped):
    ids = np.arange(count, dtype=np.int32)
    windows = Windows(SimpleNamespace(ids=ids), np.arange(count), context=4)
    found = windows.__getitems__(range(len(windows)))
    assert found["input_ids"].flatten().tolist() == [*range(count - 1 - dropped)]
    assert (found["target"] == found["input_ids"] + 1).all()
    assert found["bytes"].tolist() == found["target"].sum(1).tolist()


@pytest.mark.parametrize("count", [0, 1, 4])
def test_too_few_tokens_for_a_sample_are_explained(count):
    with pytest.raises(DataError, match=f"holds only {count} tokens of text, too few for a sample of data.context=4"):
        Windows(SimpleNamespace(ids=np.zeros(count, np.int32)), np.ones(3), context=4)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokens_stand_for_as_many_bytes_as_the_text_has(tmp_path, tokenizer):
    """Sample by sample, with characters that are cut in two, and an end token after each document."""
    folder = tmp_path / "texts"
    folder.mkdir()
    generator = np.random.default_rng(0)
    documents = ["\n".join(lines_of(generator, 60, 90)) + " the end\x7f\u00ad\ufeff" for _ in range(4)]
    for number, text in enumerate(documents):
        written(folder / f"{number}.txt", text)
    recipe = recipe_of(tmp_path, train=folder, test=folder / "3.txt", tokenizer=tokenizer, vocabulary=300, context=32)
    splits = open_splits(recipe)
    windows, opened_tokenizer = splits.train, splits.tokenizer
    end = opened_tokenizer.pad_id
    bodies = [[]]
    for token in windows.ids.tolist():
        if token == end:
            bodies.append([])
        else:
            bodies[-1].append(token)
    assert [opened_tokenizer.decode(each) for each in bodies] == [*documents[:3], ""]
    assert opened_tokenizer.token_bytes[windows.ids].sum() == sum(len(text.encode()) for text in documents[:3])
    raw = io.BytesIO("".join(documents[:3]).encode())
    raw.read(int(opened_tokenizer.token_bytes[windows.ids[0]]))
    for sample in range(len(windows)):
        columns = windows.__getitems__([sample])
        text = raw.read(int(columns["bytes"][0]))
        body = [token for token in columns["target"][0].tolist() if token != end]
        assert opened_tokenizer.decode(body) == text.decode("utf-8", "replace")


def test_parts_of_words_are_learned_from_the_training_texts_alone(tmp_path):
    """Once: the cache keeps them."""
    train, test = written(tmp_path / "a.txt", "banana " * 900), written(tmp_path / "b.txt", "cucumber " * 900)
    pieces = opened(train=train, test=test)
    found = [open_tokenizer("bpe", pieces, vocabulary=300, cache=tmp_path / "cache") for _ in range(2)]
    assert found[0].key == found[1].key
    assert len([*(tmp_path / "cache" / "tokenizers").glob("*.json")]) == 1
    tokens = with_tokens(pieces, Config(kind="text", cache=tmp_path / "cache"), found[0])
    assert len(tokens.ids) < 1000  # "banana " is one token
    assert "cucumber" not in found[0].tokenizer.to_str()


def test_the_name_of_the_end_token_in_a_text_does_not_end_it(tmp_path):
    file, other = written(tmp_path / "a.txt", "a <|end|> b\n" * 90), written(tmp_path / "b.txt", "b")
    recipe = recipe_of(tmp_path, train=file, test=file.parent / other.name, tokenizer="bpe", vocabulary=300, context=2)
    pieces = opened(train=file, test=other)
    tokenizer = open_tokenizer("bpe", pieces, vocabulary=300, cache=recipe.data.cache)
    ids = with_tokens(pieces, recipe.data, tokenizer).ids.tolist()
    assert ids.count(tokenizer.pad_id) == 1
    assert tokenizer.decode(ids[:-1]) == file.read_text()
