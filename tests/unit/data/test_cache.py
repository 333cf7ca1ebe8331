"""Tokens on disk: equal to direct tokenisation, built once, resumed after a kill, rebuilt when damaged."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.base.errors import DataError
from lockstep.data import token_cache as token_cache
from lockstep.data.chat import ChatTokenizer
from lockstep.data.collate import collate
from lockstep.data.in_memory import Texts
from lockstep.data.text_tokenizers import open_tokenizer
from lockstep.data.token_cache import tokenized, verify
from lockstep.models import _transformer as transformer

NAMES = ("short", "long")
ODD = [
    "",
    " ",
    "naïve café — 漢字かな 🙂👩‍👩‍👧",
    "zero\x00byte and \u202eright to left",
    "line\nbreak\ttab\r\n",
    "x" * 3000,
    "\ufeffa byte order mark",
]


def texts(count=40):
    words = ["market", "oil", "champion", "league", "orbit", "chip", "court", "rate", "win", "storm"]
    rows = [" ".join(words[(i * j) % 10] for j in range(i % 23)) + f" {i}" for i in range(count)]
    return Texts(rows, np.arange(count) % 2, NAMES)


class Counting:
    """Real work on real text, small enough to follow: a byte is a token."""

    pad_id = 0

    def __init__(self, key="bytes", die_at=None, how=None):
        self.key, self.die_at, self.how = key, die_at, how
        self.calls = []

    def __call__(self, rows):
        if len(self.calls) == self.die_at:
            self.how()
        self.calls.append(list(rows))
        return [np.frombuffer(row.encode(), np.uint8).astype(np.int32) for row in rows]

    def save(self, folder):
        """Nothing to keep."""


@pytest.fixture(scope="module")
def real(minilm):
    return transformer.tokenizer(transformer.Config(kind="transformer", name=str(minilm)))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(token_cache, "CHUNK", 10)


def rows_of(tokens):
    return [row.tolist() for row in tokens.__getitems__(range(len(tokens)))["input_ids"]]


def expected(source):
    return [list(text.encode()) for text in source.texts]


def folder_in(cache):
    [manifest] = cache.glob("tokens/*/manifest.json")
    return manifest.parent


def test_equal_to_direct_tokenisation(real, tmp_path, small_parts):
    source = texts()
    direct = [ids.tolist() for ids in real(list(source.texts))]
    tokens = tokenized(source, real, tmp_path)
    assert rows_of(tokens) == direct
    assert tokens.lengths.tolist() == [len(ids) for ids in direct]
    assert len(tokens) == len(source)
    assert tokens.spec == source.spec
    some = tokens.__getitems__([31, 2, 2, 39])
    assert set(some) == {"input_ids", "label"}
    assert some["label"].tolist() == [1, 0, 0, 1]
    assert [ids.tolist() for ids in some["input_ids"]] == [direct[i] for i in (31, 2, 2, 39)]
    assert {ids.dtype for ids in some["input_ids"]} == {np.dtype(np.int32)}


def test_odd_texts_with_a_real_tokenizer(real, tmp_path):
    source = Texts(ODD, np.zeros(len(ODD)), NAMES)
    tokens = tokenized(source, real, tmp_path)
    assert rows_of(tokens) == [ids.tolist() for ids in real(ODD)]
    assert tokens.lengths[[0, 5]].tolist() == [2, 3]  # nothing, and 3,000 x as one unknown word, between two marks
    batch = collate(tokens.__getitems__([0, 2]), pad_id=real.pad_id)
    assert batch["attention_mask"].sum(1).tolist() == tokens.lengths[[0, 2]].tolist()


@pytest.mark.parametrize(
    ("broken", "sound"),
    [
        ("lone \ud800 high", "lone \ufffd high"),
        ("lone low \udfff", "lone low \ufffd"),
        ("\udc80", "\ufffd"),
        ("a pair \ud83d\ude42 in two halves", "a pair 🙂 in two halves"),
        ("\ufeffmark \udc00", "\ufeffmark \ufffd"),
    ],
)
def test_surrogates_do_not_stop_a_build(real, tmp_path, broken, sound):
    """They come from files read with errors=surrogateescape and from JSON; tokenizers refuse them."""
    source = Texts(["before", broken, "after"], np.zeros(3), NAMES)
    assert rows_of(tokenized(source, real, tmp_path)) == [ids.tolist() for ids in real(["before", sound, "after"])]
    counting = Counting()
    assert tokenized(source, counting, tmp_path).lengths.tolist() == [6, len(sound.encode()), 5]


def test_only_empty_texts(tmp_path):
    tokens = tokenized(Texts(["", ""], np.zeros(2), NAMES), Counting(), tmp_path)
    assert rows_of(tokens) == [[], []]


def test_a_second_open_builds_nothing(tmp_path, small_parts):
    counting, seen = Counting(), []
    first = tokenized(texts(), counting, tmp_path, progress=lambda *done: seen.append(done))
    assert [len(call) for call in counting.calls] == [10, 10, 10, 10]
    assert seen == [(10, 40), (20, 40), (30, 40), (40, 40)]
    written = {path: path.stat().st_mtime_ns for path in folder_in(tmp_path).iterdir()}
    idle = Counting(die_at=0, how=lambda: pytest.fail("the tokenizer was called"))
    second = tokenized(texts(), idle, tmp_path, progress=lambda *_: pytest.fail("something was built"))
    assert rows_of(first) == rows_of(second) == expected(texts())
    assert written == {path: path.stat().st_mtime_ns for path in folder_in(tmp_path).iterdir()}
    assert not list(tmp_path.glob("tokens/*.partial")) + list(tmp_path.glob("tokens/*.whole"))


def folders_after(tmp_path, *pairs):
    for source, tokenizer in pairs:
        tokenized(source, tokenizer, tmp_path)
    return len(list(tmp_path.glob("tokens/*/manifest.json")))


def test_another_max_length_goes_to_another_folder(minilm, tmp_path):
    sizes = (8, 16)
    made = [
        transformer.tokenizer(transformer.Config(kind="transformer", name=str(minilm), max_length=n)) for n in sizes
    ]
    assert folders_after(tmp_path, *((texts(), tokenizer) for tokenizer in made)) == 2
    found = [tokenized(texts(), tokenizer, tmp_path).lengths.max() for tokenizer in made]
    assert found == [8, 16]


CHANGES = {
    "truncation_side": lambda tokenizer: setattr(tokenizer, "truncation_side", "left"),
    "a token": lambda tokenizer: tokenizer.add_tokens(["zzz"]),
    "a special token": lambda tokenizer: tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]}),
    "the end token": lambda tokenizer: setattr(tokenizer, "sep_token", "[MASK]"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_a_tokenizer_changes_its_key(minilm, tmp_path, change):
    """But for the side where long texts are cut, which documents and chats are not."""
    from transformers import AutoTokenizer

    found = []
    for folder in (tmp_path / "before", tmp_path / "after", tmp_path / "elsewhere"):
        plain = AutoTokenizer.from_pretrained(minilm)
        if folder.name == "after":
            CHANGES[change](plain)
        plain.save_pretrained(folder)
        section = transformer.Config(kind="transformer", name=str(folder), max_length=8)
        packed = open_tokenizer(str(folder), texts(), vocabulary=0, cache=tmp_path)
        found.append((transformer.tokenizer(section).key, ChatTokenizer(packed).key, packed.key))
    before, after, elsewhere = found
    assert before == elsewhere
    is_side = change == "truncation_side"
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, is_side, is_side]


@pytest.mark.parametrize(
    "others",
    [
        texts(41),
        Texts(["ab", "c"], np.zeros(2), NAMES),
        Texts(["abc", ""], np.zeros(2), NAMES),
        Texts(["a", "bc"], np.zeros(2), NAMES),
    ],
)
def test_other_texts_go_to_another_folder(tmp_path, others):
    assert folders_after(tmp_path, (Texts(["abc"], np.zeros(1), NAMES), Counting()), (others, Counting())) == 2


def test_other_labels_share_the_tokens(tmp_path):
    again = Texts(texts().texts, np.ones(40), NAMES)
    assert folders_after(tmp_path, (texts(), Counting()), (again, Counting())) == 1
    assert tokenized(again, Counting(), tmp_path).__getitems__([0])["label"].tolist() == [1]


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupted_build_goes_on_at_the_last_whole_part(tmp_path, small_parts):
    with pytest.raises(KeyboardInterrupt):
        tokenized(texts(), Counting(die_at=3, how=interrupt), tmp_path)
    assert not list(tmp_path.glob("tokens/*/manifest.json"))
    rest = Counting()
    assert rows_of(tokenized(texts(), rest, tmp_path)) == expected(texts())
    assert rest.calls == [list(texts().texts[30:])]


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_cache
test_cache.token_cache.CHUNK = 10
dying = test_cache.Counting(die_at=2, how=lambda: os._exit(9))
test_cache.tokenized(test_cache.texts(), dying, Path(sys.argv[2]))
"""


def test_a_killed_build_goes_on_at_the_last_whole_part(tmp_path, small_parts):
    """A process that really dies lets go of the lock, and leaves its parts."""
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path)]
    assert subprocess.run(command, timeout=100, check=False).returncode == 9
    rest = Counting()
    assert rows_of(tokenized(texts(), rest, tmp_path)) == expected(texts())
    assert [len(call) for call in rest.calls] == [10, 10]
    assert rest.calls[0][0] == texts().texts[20]


def test_a_torn_part_is_made_again(tmp_path, small_parts):
    """After a power cut a renamed file can be empty or short."""
    with pytest.raises(KeyboardInterrupt):
        tokenized(texts(), Counting(die_at=3, how=interrupt), tmp_path)
    parts = sorted(tmp_path.glob("tokens/*.partial/*"))
    os.truncate(parts[0], 100)
    os.truncate(parts[2], 0)
    rest = Counting()
    assert rows_of(tokenized(texts(), rest, tmp_path)) == expected(texts())
    assert [call[0] for call in rest.calls] == [texts().texts[i] for i in (0, 20, 30)]


def test_parts_of_another_size_are_not_mixed_up(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "CHUNK", 15)
    with pytest.raises(KeyboardInterrupt):
        tokenized(texts(), Counting(die_at=2, how=interrupt), tmp_path)
    monkeypatch.setattr(token_cache, "CHUNK", 10)
    assert rows_of(tokenized(texts(), Counting(), tmp_path)) == expected(texts())


@pytest.mark.parametrize("name", ["ids.npy", "offsets.npy", "manifest.json"])
@pytest.mark.parametrize(
    "damage", [lambda p: os.truncate(p, p.stat().st_size - 1), lambda p: os.truncate(p, 0), os.remove]
)
def test_a_damaged_file_is_rebuilt(tmp_path, name, damage):
    tokenized(texts(), Counting(), tmp_path)
    damage(file := folder_in(tmp_path) / name)
    again = Counting()
    assert rows_of(tokenized(texts(), again, tmp_path)) == expected(texts())
    assert len(again.calls) == 1
    assert file.is_file()
    assert verify(folder_in(tmp_path)) == []


@pytest.mark.parametrize("name", ["ids.npy", "offsets.npy"])
@pytest.mark.parametrize("where", [0, 0.5, 0.999])
def test_verify_names_a_flipped_byte(tmp_path, name, where):
    tokenized(texts(), Counting(), tmp_path)
    file = folder_in(tmp_path) / name
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1
    file.write_bytes(data)
    assert verify(folder_in(tmp_path)) == [name]


def test_manifest_holds_sizes_and_sums(tmp_path):
    tokenized(texts(), Counting(), tmp_path)
    folder = folder_in(tmp_path)
    for name, (size, sha256) in json.loads((folder / "manifest.json").read_text()).items():
        data = (folder / name).read_bytes()
        assert (size, sha256) == (len(data), hashlib.sha256(data).hexdigest())


def open_and_count(cache):
    """In a process of a pool: open, and say what was seen and how often the tokenizer worked."""
    token_cache.CHUNK = 10
    counting = Counting()
    return rows_of(tokenized(texts(400), counting, cache)), len(counting.calls)


def test_many_processes_build_once(ranks, tmp_path):
    results = ranks(3, open_and_count, tmp_path)
    assert [rows for rows, _ in results] == [expected(texts(400))] * 3
    assert sorted(calls for _, calls in results) == [0, 0, 40]


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_an_unwritable_folder_is_a_data_error(tmp_path, below):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"(?s)cannot keep tokens in .*file.*data\.cache"):
        tokenized(texts(), Counting(), tmp_path / "file" / below)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind root")
def test_a_read_only_cache_that_is_whole_can_be_used(tmp_path):
    tokenized(texts(), Counting(), tmp_path)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(path.stat().st_mode & 0o555)
    try:
        assert rows_of(tokenized(texts(), Counting(), tmp_path)) == expected(texts())
        with pytest.raises(DataError, match="Permission denied"):
            tokenized(texts(41), Counting(), tmp_path)
    finally:
        for path in [tmp_path, *tmp_path.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o700)
