"""Chats: the assistant's words alone are learned, with a plain template or that of the tokenizer; answers by a server."""

import datetime
import json
import os

import psutil
import pytest
from chats import ANSWER, ASK, CHATS, TEMPLATE, THANK, WELCOME, said, templated
from running import lockstep, summary
from served import serving
from tokenizers import decoders, normalizers

from lockstep.base.errors import DataError
from lockstep.core.numerics.word_tokens import ids_of
from lockstep.data.chat import ChatTokenizer, Contents
from lockstep.data.sources import _chat, chat
from lockstep.data.text_tokenizers import Bytes
from lockstep.recipe.recipe import load
from lockstep.recipe.splits import open_splits

SETTINGS = ["train.steps=60", "train.global_batch=16", "train.micro_batch=4", "optim.lr=0.01", "observe.log_every=10"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": CHATS[n % 3]}) for n in range(240)))
    (folder / "c.yaml").write_text(
        "data: {kind: chat, train: chats.jsonl, context: 64}\nmodel: {kind: gpt, layers: 2, width: 32, heads: 2}\n"
    )
    return folder


def test_a_plain_template():
    tokenizer = ChatTokenizer(Bytes())
    (ids,) = tokenizer([json.dumps(CHATS[2])])
    learned, every = said(tokenizer, ids)
    assert learned == "twoyou are welcome" and (ids == 256).sum() == 2  # the end of each answer is learned, too
    assert every == "user: one or two?\nassistant: two\nuser: thanks \u00e9\nassistant: you are welcome\n"
    assert tokenizer.decode(tokenizer.prompt([ASK])) == "user: one or two?\nassistant: "


def test_the_tokenizers_own_template(folder):
    tokenizer = templated(folder)
    (ids,) = tokenizer([json.dumps(CHATS[2])])
    stop = tokenizer.pad_id
    learned, every = said(tokenizer, ids)
    assert learned == "two\nyou are welcome\n" and [each for each in ids if each == stop] == [stop] * 2
    assert every == "user\none or two?\nassistant\ntwo\nuser\nthanks \u00e9\nassistant\nyou are welcome\n"
    theirs = tokenizer.template.tokenizer
    whole = theirs.apply_chat_template(CHATS[2], tokenize=True, return_dict=True)["input_ids"]
    assert ids_of(ids).tolist() == whole
    asked = theirs.apply_chat_template([ASK], tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.prompt([ASK]) == asked


def test_chats_together_have_the_tokens_of_each_alone(folder):
    texts = [json.dumps(chat) for chat in CHATS]
    for tokenizer in (ChatTokenizer(Bytes()), templated(folder)):
        together = tokenizer(texts)
        assert [ids.tolist() for ids in together] == [tokenizer([text])[0].tolist() for text in texts]
        assert tokenizer([]) == [] and {ids.dtype.name for ids in together} == {"int32"}


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ messages | length }}", "changes earlier messages when later ones follow"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves out what the assistant says",
        ),
        (
            "{{ raise_exception('no system messages') }}",
            "the chat template does not take this chat: no system messages",
        ),
    ],
)
def test_templates_that_cannot_be_used(folder, template, message):
    with pytest.raises(DataError, match=message):
        templated(folder, template)([json.dumps(CHATS[2])])


DATED = (
    "{{ '<|start|>system\n' + strftime_now('%d %b %Y %H:%M') + ['a', 'b', 'c', 'd', 'e', 'f'] | random + lipsum(n=1, html=false, min=2, max=4) }}"
    + TEMPLATE
)


def test_a_template_is_told_the_day_of_training_and_draws_the_same_each_time(folder):
    day, other = datetime.date(2024, 7, 26), datetime.date(2024, 7, 27)
    inner = templated(folder, DATED).inner
    on_day, again, on_other = (ChatTokenizer(inner, day=each) for each in (day, day, other))
    (ids,) = on_day([json.dumps(CHATS[2])])
    learned, every = said(on_day, ids)
    assert learned == "two\nyou are welcome\n" and every.startswith("system\n26 Jul 2024 00:00")
    assert ids.tolist() == again([json.dumps(CHATS[2])])[0].tolist() != on_other([json.dumps(CHATS[2])])[0].tolist()
    assert on_day.key == again.key != on_other.key
    assert on_day.prompt([ASK], on=day) == ids_of(ids)[: len(on_day.prompt([ASK], on=day))].tolist()
    now = on_day.decode(on_day.prompt([ASK]))
    assert now.startswith(f"system\n{datetime.date.today():%d %b %Y}"), "answers are given on the day it is"
    undated = templated(folder).inner
    assert len({ChatTokenizer(undated, day=each).key for each in (day, other, None)}) == 1


def test_the_day_of_the_first_start_is_kept(folder, monkeypatch):
    """Where the clock shows UTC+14 and UTC-12, it is never the same day."""
    monkeypatch.chdir(folder)
    for name, template in (("dated", DATED), ("undated", TEMPLATE)):
        templated(folder, template)
        (folder / "tokenizer").rename(folder / name)

    def trained(name, *settings, zone="Etc/GMT-14", code=0, tokenizer="dated"):
        more = [
            "launch.processes=1",
            "evaluate.sample_tokens=0",
            "schedule.shape=constant",
            "data.cache=cache",
            f"data.tokenizer={folder / tokenizer}",
            *settings,
        ]
        environment = os.environ | {"TZ": zone}
        done = lockstep(folder, "train", "c.yaml", *SETTINGS, f"run.name={name}", *more, env=environment)
        assert done.returncode == code, done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split()), summary(folder, name)

    told, first = trained("day", "train.steps=2")
    day = first["numeric_recipe"]["data.date"]
    assert f"data.date={day}" in told and f"date: '{day}'" in (folder / "runs" / "day" / "recipe.yaml").read_text()
    _, resumed = trained("day", "train.steps=4", zone="Etc/GMT+12")
    _, whole = trained("whole", "train.steps=4", f"data.date={day}", zone="Etc/GMT+12")
    _, later = trained("later", "train.steps=4", zone="Etc/GMT+12")
    assert resumed["digest"] == whole["digest"] != later["digest"]
    told, _ = trained("day", "train.steps=6", "data.date=2020-02-02", code=2)
    assert f"data.date: '{day}' in the checkpoint, '2020-02-02' now" in told, told
    _, without = trained("without", "train.steps=2", tokenizer="undated")
    assert "data.date" not in without["numeric_recipe"]
    told, _ = trained("without", "train.steps=4", "data.date=2020-02-02", tokenizer="undated")
    assert "2020" not in told


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages }}{% endfor %}{% endfor %}",
    "{% macro again() %}{{ again() }}{{ again() }}{% endmacro %}{{ again() }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{% set all = namespace(a='a') %}{% for _ in range(60) %}{% set all.a = all.a ~ all.a %}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_templates_that_have_no_end(folder, template, monkeypatch):
    monkeypatch.setattr("lockstep.data.chat.SECONDS", 0.5)
    tokenizer, before = templated(folder, template), psutil.Process().memory_info().rss
    for render in (lambda: tokenizer([json.dumps(CHATS[0])]), lambda: tokenizer.prompt([ASK])):
        with pytest.raises(DataError, match="takes more than 0.[56] s, or 512 MB|does not take this chat: maximum rec"):
            render()
    assert psutil.Process().memory_info().rss < before + (64 << 20)


def test_what_is_not_learned_is_no_target(folder, monkeypatch):
    monkeypatch.chdir(folder)
    splits = open_splits(load(folder / "c.yaml", ["data.cache=cache"]))
    rows = splits.train.__getitems__(range(len(splits.train)))
    assert rows["input_ids"].min() >= 0
    learned = rows["target"][rows["target"] >= 0]
    assert set(splits.tokenizer.decode(learned[learned < 256].tolist())) == set("twoyou are welcome")
    texts = [splits.tokenizer.decode(row[(row >= 0) & (row < 256)].tolist()) for row in rows["target"]]
    assert rows["bytes"].tolist() == [len(text.encode()) for text in texts]
    shifted = rows["input_ids"][:, 1:] == rows["target"][:, :-1]
    assert shifted[rows["target"][:, :-1] >= 0].all()


def train(folder, name, *settings):
    done = lockstep(folder, "train", "c.yaml", *SETTINGS, *settings, f"run.name={name}")
    assert done.returncode == 0, done.stdout + done.stderr
    return {key: summary(folder, name)[key] for key in ("digest", "evaluation")}


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_the_same_bits_and_answers(folder):
    found = []
    for kind, processes in (("ddp", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("pipeline", 2)):
        cluster = [f"parallel.kind={kind}", f"launch.processes={processes}", "train.steps=20"]
        found.append(train(folder, f"{kind}{processes}", *cluster))
    assert all(each == found[0] for each in found)
    assert train(folder, "long", "launch.processes=1")["evaluation"]["perplexity"] < 1.5  # it knows its two answers
    done = lockstep(folder, "export", "runs/long", "--to", "export")
    assert done.returncode == 0, done.stdout + done.stderr
    asked = {"temperature": 0, "max_tokens": 40}
    with serving(folder / "export") as server:
        answers = [server.post("/generate", json={"messages": [each], **asked}).json() for each in (ASK, THANK)]
        assert [(each["text"], each["finish"]) for each in answers] == [("two", "end"), ("you are welcome", "end")]
        assert server.post("/generate", json={"prompt": ASK["content"], **asked}).json()["text"] == "two"
        longer = server.post("/generate", json={"messages": CHATS[0] + [THANK], **asked}).json()
        assert longer["text"] == "you are welcome"
        wrong = server.post("/generate", json={"messages": [ASK], "prompt": "x"})
        assert wrong.status_code == 422 and "give either prompt or messages" in wrong.json()["error"]
    (folder / "asked.csv").write_text(f"text\n{ASK['content']}\n{THANK['content']}\n")
    done = lockstep(folder, "predict", "export", "asked.csv", "--out", "answered.csv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(",")[-1] for line in (folder / "answered.csv").read_text().splitlines()[1:]] == [
        '"two"',
        '"you are welcome"',
    ]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"messages": []}', "the chat is an empty list: write messages such as"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no text 'content'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message has the role 'assistant'"),
        ('{"text": "x"}', "has no 'messages': name the list of messages with data.messages_column"),
        ("no json", "Expecting value"),
    ],
)
def test_wrong_chats_are_named_by_their_line(folder, tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text((folder / "chats.jsonl").read_text().replace("\n", f"\n{line}\n", 1))
    done = lockstep(folder, "train", "c.yaml", f"data.train={tmp_path / 'bad.jsonl'}", "run.name=bad")
    told = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and message in told and "line 2" in told and "Traceback" not in told, told


SEAMS = {
    "a space before the answer": "{% for m in messages %}{{ m.role + ': ' + m.content + '<|stop|>' }}{% endfor %}",
    "a line break": "{% for m in messages %}{{ '### ' + m.role + '\n\n' + m.content + '\n\n' }}{% endfor %}",
}
SAID = ["two", " two", "\n\ntwo", "1", "\u00e9t\u00e9", "Two, three", ": :", ""]


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("is_llama", [False, True])
def test_what_is_asked_begins_what_was_learned(folder, seam, is_llama):
    """Token by token, whatever the answer begins with, and whether the tokenizer puts a space before each text."""
    prompt = "{% if add_generation_prompt %}{{ '### assistant\n\n' }}{% endif %}"
    prompt = prompt if "###" in SEAMS[seam] else "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = templated(folder, SEAMS[seam] + prompt)
    if is_llama:
        inner = tokenizer.inner.tokenizer
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        inner.decoder = decoders.Sequence(
            [decoders.ByteLevel(), decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)]
        )
    pairs = [(first, second) for first in SAID for second in SAID[:4]]
    answers = {each: {"role": "assistant", "content": each} for each in SAID}
    rows = tokenizer([json.dumps([ASK, answers[first], THANK, answers[second]]) for first, second in pairs])
    at_first = tokenizer.prompt([ASK])
    then = {each: tokenizer.prompt([ASK, answers[each], THANK]) for each in SAID}
    for (first, second), ids in zip(pairs, rows, strict=True):
        every = ids_of(ids).tolist()
        asked = at_first, then[first]
        assert all(every[: len(each)] == each for each in asked), (first, second)
        learned = [ids[len(each) :].tolist() for each in asked]
        assert all(row[0] >= 0 for row in learned if first and second), "its first token is learned"
        whole = tokenizer.decode(ids[ids >= 0].tolist())
        assert whole.replace("\n\n", "").replace(" ", "") == (first + second).replace("\n\n", "").replace(" ", "")


WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": {}}}


def test_what_is_not_to_be_learned_and_functions(folder, tmp_path):
    """As plain transformers renders them; `train: false` and `weight: 0` are context alone."""
    left_out = [
        ASK,
        ANSWER | {"train": False},
        ASK,
        ANSWER | {"weight": 0},
        THANK,
        WELCOME | {"weight": 1, "train": True},
    ]
    rows = [
        {"messages": left_out, "tools": [WEATHER], "id": 7},
        {"messages": CHATS[0], "tools": json.dumps([WEATHER])},
        {"messages": CHATS[0], "tools": None, "source": "x"},
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text(json.dumps({"messages": CHATS[0]}))
    config = chat.Config(kind="chat", train=tmp_path / "chats.jsonl", test=tmp_path / "test.jsonl")
    source = _chat.build(config, "train")
    assert [*source.remarks] == ["of chats.jsonl nothing but 'messages' and 'tools' is used: not id, source"]
    texts = source.__getitems__(range(3))["text"]
    tools = "{% if tools %}{{ '<|start|>tools\n' + tools[0].function.name + '<|stop|>' }}{% endif %}"
    tokenizer = templated(folder, tools + TEMPLATE)
    theirs, found = tokenizer.template.tokenizer, tokenizer(texts)
    for row, given, ids in zip(rows, ([WEATHER], [WEATHER], None), found, strict=True):
        whole = theirs.apply_chat_template(row["messages"], tools=given, tokenize=True, return_dict=True)["input_ids"]
        assert ids_of(ids).tolist() == whole
    assert [said(tokenizer, ids)[0] for ids in found] == ["you are welcome\n", "two\n", "two\n"]
    plain = ChatTokenizer(Bytes())
    assert said(plain, plain(texts)[0])[0] == "you are welcome"
    assert "one or two?" in Contents(source).__getitems__([0])["text"][0]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": left_out[:4]}))
    with pytest.raises(DataError, match="each answer is left out by 'train' or 'weight', so nothing is learned of it"):
        _chat.build(config, "train")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHATS[0], "tools": "weather"}))
    with pytest.raises(DataError, match="line 1 .*'tools' is no list of the schemas of functions"):
        _chat.build(config, "train")
