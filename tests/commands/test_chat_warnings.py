"""What a run says of its chats at the start, and of a model's folder that cannot be used; chats in tables of answers."""

import csv
import json

import pytest
from chats import ASK, CHATS
from exporting import text_case
from running import lockstep
from transformers import AutoTokenizer

from lockstep.base.errors import DataError
from lockstep.data.chat import is_learned
from lockstep.data.chat_forms import messages_of

QUESTION = {"role": "user", "content": "one or two?"}
SILENT, ROBOT = {"role": "assistant", "content": ""}, {"role": "robot", "content": "beep"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on chats, three of which are unusual -> its folder, and what it said."""
    folder = tmp_path_factory.mktemp("chats")
    rows = [CHATS[n % 3] for n in range(30)]
    rows[4], rows[5], rows[9] = [ASK, ROBOT, *CHATS[0][1:]], [ASK, ROBOT, *CHATS[0][1:]], [QUESTION, SILENT]
    rows[12] = [ASK | {"train": True}, *CHATS[0][1:]]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    config = {
        "data": {"kind": "chat", "train": "chats.jsonl", "test": "chats.jsonl", "context": 64},
        "model": {"kind": "gpt", "layers": 1, "width": 16, "heads": 2},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 4},
        "evaluate": {"sample_tokens": 4},
        "launch": {"processes": 1},
        "run": {"name": "r"},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    done = lockstep(folder, "train", "c.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout + done.stderr


def test_unusual_chats_are_named(trained):
    _, output = trained
    assert "line 5 of chats.jsonl and 1 more: the role 'robot', where usual ones are system, developer, user" in output
    assert "line 10 of chats.jsonl: an empty answer, which is learned" in output
    assert "line 13 of chats.jsonl: 'train' in a message of the role 'user': only what the assistant says is" in output


@pytest.mark.parametrize(
    ("key", "value", "is_it"),
    [("train", value, value in (True, 1, "true")) for value in (True, False, 0, 1, "true", "False")]
    + [("weight", value, value in (1, 1.0, "1")) for value in (0, 0.0, "0", "0.0", 1, 1.0, "1")],
)
def test_keys_that_leave_an_answer_out_in_all_their_forms(key, value, is_it):
    _, answer = messages_of([QUESTION, {"role": "assistant", "content": "one", key: value}])
    assert is_learned(answer) is is_it


@pytest.mark.parametrize(("key", "value", "written"), [("train", "maybe", "true or false"), ("weight", 0.5, "1 or 0")])
def test_other_values_of_these_keys_are_refused(key, value, written):
    with pytest.raises(DataError, match=f"^message 2: '{key}' is {value!r}: write {written}$"):
        messages_of([QUESTION, {"role": "assistant", "content": "one", key: value}])


def test_what_is_cut_is_counted(trained):
    folder, output = trained
    lengths = [
        sum(
            len(f"{each['role']}: {each['content']}\n".encode()) + (each["role"] == "assistant")
            for each in row["messages"]
        )
        for row in map(json.loads, (folder / "chats.jsonl").read_text().splitlines())
    ]
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    cut = sum((end - size) // 64 < (end - 1) // 64 for end, size in zip(ends, lengths, strict=True) if size <= 64)
    assert f"{cut} of 30 chats stand across the end of a sample of data.context=64 tokens" in output
    left = (ends[-1] - 1) % 64
    assert f"the last {left} of {ends[-1]:,} tokens of the train split fill no sample of data.context=64" in output
    assert f"the last {left} of {ends[-1]:,} tokens of the test split" in output


def test_a_tokenizer_without_a_template_is_named(trained, minilm):
    folder, output = trained
    said = "the tokenizer has no chat template: a plain one is used, in training, in use and in exports"
    assert said not in output  # that of gpt's bytes is the plain one
    done = lockstep(folder, "train", "c.yaml", f"data.tokenizer={minilm}", "run.name=plain")
    assert done.returncode == 0 and said in " ".join((done.stdout + done.stderr).split()), done.stdout + done.stderr


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_columns_of_chats_go_out_as_they_came_in(trained, suffix):
    folder, _ = trained
    rows = [
        {"conversations": [{"from": "human", "value": "one or two?"}, {"from": "gpt", "value": "two"}], "id": 7},
        {"conversations": [{"from": "human", "value": "hi"}], "id": 8},
    ]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = folder / f"answered{suffix}"
    done = lockstep(folder, "predict", "runs/r", "asked.jsonl", "--out", out.name, "--max-tokens", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    with out.open(encoding="utf-8", newline="") as file:
        found = [*csv.DictReader(file)] if suffix == ".csv" else [*map(json.loads, file)]
    if suffix == ".csv":
        found = [each | {"conversations": json.loads(each["conversations"]), "id": int(each["id"])} for each in found]
    assert [{key: each[key] for key in ("conversations", "id")} for each in found] == rows
    assert all("completion" in each and len(each) == 3 for each in found)


def broken(folder, what):
    if what == "weights":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-50])
    elif what == "tokenizer":
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
            (folder / name).unlink(missing_ok=True)
    else:
        (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "): the folder needs whole files: config.json, weights (model.safetensors)"),
        ("tokenizer", "model holds no tokenizer: copy tokenizer.json and tokenizer_config.json from the model"),
        ("missing", "elsewhere: correct its path, or name a model of the hub"),
    ],
)
def test_a_folder_that_is_no_whole_model(tmp_path, minilm, what, message):
    folder = tmp_path / "model"
    text_case(folder, minilm)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    if what != "missing":
        broken(folder, what)
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"text {n},{'ab'[n % 2]}\n" for n in range(20)))
    words = ["data.kind=files", "data.train=t.csv", "data.test=t.csv", "model.kind=transformer", "train.steps=1"]
    name = "./elsewhere" if what == "missing" else "./model"
    (tmp_path / "c.yaml").write_text("launch: {processes: 1}\n")
    done = lockstep(tmp_path, "train", "c.yaml", *words, f"model.name={name}", "train.micro_batch=4")
    assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_template_that_is_no_jinja(tmp_path, trained, minilm):
    folder, _ = trained
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    broken(tmp_path / "tokenizer", "template")
    words = ["run.name=b", "model.kind=gpt", f"data.tokenizer={tmp_path / 'tokenizer'}"]
    done = lockstep(folder, "train", "c.yaml", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"line 2 of the chat template of {tmp_path / 'tokenizer'} is not Jinja" in done.stderr
