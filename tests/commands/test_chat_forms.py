"""Chats in all the forms that people have: templates that change earlier turns, parts, columns, calls of functions."""

import json

import pytest
from chats import ASK, CHATS, TEMPLATE, THANK, said, templated
from running import lockstep, summary
from served import serving

from lockstep.base.errors import DataError
from lockstep.core.numerics.word_tokens import ids_of
from lockstep.data.chat_forms import messages_of
from lockstep.data.sources import _chat, chat
from lockstep.inference.loaded_model import load

QWEN3 = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set parts = (m.content or '').split('</think>') %}{{- '<|start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or parts | length > 1) %}"
    "{{- '<think>\n' + (parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '') + '\n</think>\n\n' }}{%- endif %}"
    "{{- parts[-1].lstrip('\n') }}{%- for c in m.tool_calls or [] %}{{- c.function.name }}{%- endfor %}{{- '<|stop|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant\n' }}{%- endif %}"
)
"""Writes a thought behind the last question alone, there an empty one where there is none."""
R1 = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}{{ m.content.split('</think>')[-1] + '<|stop|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n<think>\n' }}{% endif %}"
)
"""Drops all thoughts, and begins one in its prompt."""
THINK = {"role": "assistant", "content": "<think>\none, one\n</think>\n\ntwo"}
PLAIN = {"role": "assistant", "content": "you are welcome"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "count", "arguments": {}}}],
}
FOUND = {"role": "tool", "content": "2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": CHATS[n % 3]}) for n in range(240)))
    return folder


@pytest.mark.parametrize(
    "messages",
    [
        [ASK, THINK],
        [ASK, THINK, THANK, PLAIN],
        [ASK, PLAIN, THANK, THINK, ASK, THINK],
        [ASK, CALL, FOUND, PLAIN, THANK, CALL, FOUND, THINK],
        [{"role": "system", "content": "two"}, ASK, THINK | {"weight": 0}, THANK, THINK],
    ],
)
def test_each_answer_is_learned_as_it_is_asked_for(folder, messages):
    """What plain transformers renders up to it, with the tokens of the prompt."""
    tokenizer = templated(folder, QWEN3)
    theirs = tokenizer.template.tokenizer
    rows = tokenizer([json.dumps(messages)])
    answers = [n for n, each in enumerate(messages) if each["role"] == "assistant" and each.get("weight") != 0]
    assert len(rows) == (1 if len(answers) == 1 and len(messages) == 2 else len(answers))
    for number, ids in zip(answers, rows, strict=True):
        asked = theirs.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
        whole = theirs.apply_chat_template(messages[: number + 1], tokenize=False)
        learned, _ = said(tokenizer, ids)
        assert theirs.decode(ids_of(ids).tolist()) == whole and whole.startswith(asked)
        assert theirs.decode(ids[ids >= 0].tolist()) == whole[len(asked) :] and "<think>" not in asked
        prompt = tokenizer.prompt(messages[:number])
        assert ids_of(ids)[: len(prompt)].tolist() == prompt and (ids[len(prompt) :] >= 0).all()


def test_a_chat_whose_turns_stay_is_one_sample(folder):
    """Also where its template changes others: two answers to one question."""
    messages = [ASK, CALL | {"content": "<think>\none\n</think>\n\n"}, FOUND, THINK]
    tokenizer = templated(folder, QWEN3)
    (ids,) = tokenizer([json.dumps(messages)])
    learned, _ = said(tokenizer, ids)
    assert learned.count("count") == learned.count("two\n") == 1


@pytest.mark.parametrize(
    "answer, learned",
    [
        (THINK, "one, one\n</think>\n\ntwo<|stop|>"),
        (THINK | {"content": "one, one</think>two"}, "one, one</think>two<|stop|>"),
        (PLAIN, "\n</think>\n\nyou are welcome<|stop|>"),
        (PLAIN | {"reasoning_content": "one"}, "one\n</think>\n\nyou are welcome<|stop|>"),
    ],
)
def test_a_thought_that_the_prompt_begins(folder, answer, learned):
    """Where the template has no thoughts in its answers; the one of the turn before is left out."""
    tokenizer = templated(folder, R1)
    theirs = tokenizer.template.tokenizer
    rows = tokenizer([json.dumps([ASK, THINK, THANK, answer])])
    assert theirs.decode(rows[0][rows[0] >= 0].tolist()) == "one, one\n</think>\n\ntwo<|stop|>"
    assert theirs.decode(rows[1][rows[1] >= 0].tolist()) == learned
    prompt = tokenizer.prompt([ASK, THINK, THANK])
    assert ids_of(rows[1])[: len(prompt)].tolist() == prompt
    assert theirs.decode(prompt).endswith("thanks \u00e9<|stop|><|start|>assistant\n<think>\n")


def built(folder, rows, **options):
    (folder / "forms.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "test.jsonl").write_text(json.dumps({"messages": CHATS[0]}))
    config = chat.Config(kind="chat", train=folder / "forms.jsonl", test=folder / "test.jsonl", **options)
    source = _chat.build(config, "train")
    return source, [json.loads(text) for text in source.__getitems__(range(len(source)))["text"]]


def test_the_last_answer_alone(folder, tmp_path):
    source, _ = built(tmp_path, [{"messages": CHATS[2]}, {"messages": [ASK, THINK, THANK, PLAIN]}], turns="last")
    texts = source.__getitems__(range(2))["text"]
    for tokenizer in (templated(folder), templated(folder, QWEN3), templated(folder, R1)):
        learned = [said(tokenizer, ids)[0] for ids in tokenizer(texts)]
        assert len(learned) == 2 and all("welcome" in each and "two" not in each for each in learned)


ANSWERED = [{"role": "user", "content": "one or two?"}, {"role": "assistant", "content": "two"}]
FORMS = {
    "parts": {"messages": [ASK | {"content": [{"type": "text", "text": "one or "}, "two?"]}, ANSWERED[1]]},
    "null beside": {"messages": [ASK | {"name": None}, ANSWERED[1] | {"tool_calls": None}]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "one or two?"}, {"from": "gpt", "value": "two"}]},
    "prompt and completion": {"prompt": "one or two?", "completion": "two"},
    "lists of messages": {"prompt": ANSWERED[:1], "completion": ANSWERED[1:]},
    "Alpaca": {"instruction": "one or two?", "input": "", "output": "two"},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rows(tmp_path, form):
    source, chats = built(tmp_path, [FORMS[form]] * 3)
    assert chats == [ANSWERED] * 3 and not source.remarks
    assert source.place(1) == f"line 2 of {tmp_path / 'forms.jsonl'}"


def test_more_of_a_form(tmp_path):
    row = {"instruction": "one or", "input": "two?", "output": "two", "system": "count", "id": 3}
    source, (found,) = built(tmp_path, [row])
    assert found == [{"role": "system", "content": "count"}, ASK | {"content": "one or\n\ntwo?"}, ANSWERED[1]]
    assert "is used: not id" in source.remarks[0]
    _, (found,) = built(tmp_path, [{"messages": [ASK, CALL, FOUND, PLAIN]}])
    assert found == [ASK, CALL, FOUND, PLAIN]


@pytest.mark.parametrize(
    "given, reason",
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "has a part of the type 'image_url'",
        ),
        ([{"role": "assistant", "content": None}], "message 1 has no text 'content'"),
        ([ASK, {"from": 3, "value": "x"}], "message 2 has no text 'role'"),
        ("one or two?", "the chat is no list of messages"),
        ([{"role": ["user"], "tool_calls": [{}]}], "message 1 has no text 'role'"),
        ([ASK, "two"], "message 2 has no text 'role'"),
    ],
)
def test_what_is_no_chat(given, reason):
    with pytest.raises(DataError, match=reason):
        messages_of(given)


def test_a_chat_that_the_assistant_begins(folder):
    """What it says before anybody asks is read."""
    tokenizer = templated(folder)
    (ids,) = tokenizer([json.dumps([PLAIN, *CHATS[0]])])
    learned, every = said(tokenizer, ids)
    assert learned == "two\n" and every.startswith("assistant\nyou are welcome\nuser\n")
    prompt = tokenizer.prompt([PLAIN, ASK])
    assert ids_of(ids)[: len(prompt)].tolist() == prompt


def called(arguments):
    return CALL | {"tool_calls": [{"type": "function", "function": {"name": "count", "arguments": arguments}}]}


@pytest.mark.parametrize(
    "written, is_same",
    [
        ("c.function.arguments | tojson", True),
        ("c.function | tojson", True),
        ("c['function']['arguments']|tojson", True),
        ("(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)", False),
        ("c.function.arguments ~ ''", False),
    ],
)
def test_arguments_of_calls_are_objects_or_json(folder, written, is_same):
    """As OpenAI's clients write them, and as transformers' templates take them; a template of texts gets these."""
    calls = "{% for c in m.tool_calls or [] %}{{ '<call>' ~ CALL }}{% endfor %}".replace("CALL", written)
    tokenizer = templated(
        folder,
        TEMPLATE.replace("+ m['content']", "+ (m['content'] or '')", 1).replace(
            "{% endfor %}", calls + "{% endfor %}", 1
        ),
    )
    theirs = tokenizer.template.tokenizer
    for arguments in ({"x": 1}, '{"x":1}', "one"):
        (ids,) = tokenizer([json.dumps([ASK, called(arguments), FOUND, PLAIN])])
        given = {"x": 1} if is_same and arguments != "one" else arguments
        whole = theirs.apply_chat_template([ASK, called(given), FOUND, PLAIN], tokenize=False)
        assert theirs.decode(ids_of(ids).tolist()) == whole
        assert (
            tokenizer.prompt([ASK, called(arguments), FOUND])
            == ids_of(ids)[: len(tokenizer.prompt([ASK, called(arguments), FOUND]))].tolist()
        )


def test_a_template_that_takes_parts_alone(folder):
    """Of a text it would write nothing."""
    template = TEMPLATE.replace(
        "+ m['content']", "+ (m['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)", 1
    )
    tokenizer = templated(folder, template)
    plain = templated(folder)
    assert tokenizer.template.takes_parts and not plain.template.takes_parts
    (ids,), (same,) = (each([json.dumps(CHATS[2])]) for each in (tokenizer, plain))
    assert ids.tolist() == same.tolist() and tokenizer.prompt([ASK]) == plain.prompt([ASK])
    assert [*tokenizer.special().ends] == [*plain.special().ends]


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}" + TEMPLATE
)


def told(done):
    return " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    """A run's folder, with a template that refuses some chats and one that changes turns."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": CHATS[n % 3]}) for n in range(240)))
    for name, template in (("strict", STRICT), ("qwen3", QWEN3)):
        templated(folder, template)
        (folder / "tokenizer").rename(folder / name)
    config = {
        "data": {"kind": "chat", "train": "chats.jsonl", "context": 64, "cache": "cache"},
        "model": {"kind": "gpt", "layers": 2, "width": 32, "heads": 2},
        "train": {"steps": 3, "global_batch": 8, "micro_batch": 2},
        "evaluate": {"sample_tokens": 0},
        "launch": {"processes": 1},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    return folder


def test_a_chat_that_the_template_refuses_is_named_or_left_out(configured):
    bad = [{"messages": [ASK, ASK, PLAIN]}, {"messages": [ASK]}]
    rows = [{"messages": CHATS[n % 3]} for n in range(120)]
    (configured / "bad.jsonl").write_text("\n".join(map(json.dumps, [*rows[:60], bad[0], *rows[60:], bad[1]])))
    (configured / "good.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (configured / "worse.jsonl").write_text("\n".join(map(json.dumps, [*rows[:60], bad[0], *rows[60:]])))
    (configured / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(name, *settings):
        more = ["data.tokenizer=strict", "data.test=test.jsonl", f"run.name={name}", *settings]
        return lockstep(configured, "train", "c.yaml", *more)

    stopped = run("stopped", "data.train=worse.jsonl")
    reason = "line 61 of worse.jsonl: the chat template does not take this chat: roles must alternate"
    assert stopped.returncode == 2 and reason in told(stopped).replace(f"{configured}/", ""), told(stopped)
    assert "data.on_bad_sample=skip" in told(stopped) and "Traceback" not in told(stopped)
    found = []
    for name, file, processes in (("skipped", "bad", 1), ("two", "bad", 2), ("good", "good", 1)):
        settings = "data.on_bad_sample=skip", f"data.train={file}.jsonl", f"launch.processes={processes}"
        done = run(name, *settings, *([] if name == "good" else ["data.test=bad.jsonl"]))
        assert done.returncode == 0, told(done)
        found.append((summary(configured, name)["digest"], told(done).replace(f"{configured}/", "")))
    evaluated = lockstep(configured, "evaluate", "runs/two", "launch.processes=1")
    assert evaluated.returncode == 0, told(evaluated)
    assert len({digest for digest, _ in found}) == 1, "what is left out changes nothing"
    for _, text in found[:2]:
        assert "1 of 121 chats are left out: line 61 of bad.jsonl: the chat template does not take" in text, text
        assert "1 of 122 chats are left out: line 122 of bad.jsonl: no message has the role 'assistant'" in text, text
    assert "left out" not in found[2][1]


@pytest.mark.parametrize("documents", ["joined", "apart"])
def test_split_chats_give_the_same_bits(configured, documents):
    """On any number of processes, and those of files in which each answer is a chat of its own."""
    many, rows = [ASK, THINK, THANK, PLAIN], [{"messages": [ASK, THINK, THANK, PLAIN], "id": n} for n in range(24)]
    alone = [{"messages": part} for _ in rows for part in ([*many[:2]], [*many[:2], many[2], many[3]])]
    for row in alone[1::2]:
        row["messages"] = [row["messages"][0], row["messages"][1] | {"train": False}, *row["messages"][2:]]
    (configured / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (configured / "alone.jsonl").write_text("\n".join(map(json.dumps, alone)))
    (configured / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = {}
    for file, kind, processes in (("alone", "ddp", 1), ("many", "fsdp", 2)):
        name = f"{file}{processes}{documents}"
        settings = (
            f"data.train={file}.jsonl",
            f"launch.processes={processes}",
            f"data.documents={documents}",
            f"parallel.kind={kind}",
        )
        done = lockstep(
            configured,
            "train",
            "c.yaml",
            "data.tokenizer=qwen3",
            "data.test=test.jsonl",
            f"run.name={name}",
            "data.context=16",
            *settings,
        )
        assert done.returncode == 0, told(done)
        found[name] = summary(configured, name)["digest"], told(done)
    assert len({digest for digest, _ in found.values()}) == 1
    for text in (text for name, (_, text) in found.items() if name.startswith("many")):
        assert text.count("24 chats are learned as 48 samples") == 1 == text.count(" chats are learned as "), text
        assert "have more than data.context=16 tokens" in text, text


def test_keys_that_nobody_reads_are_named(configured):
    rows = [{"messages": [ASK | {"name": "Ann"}, PLAIN | {"weight": 1, "tool_calls": [], "mood": "good"}]}] * 120
    (configured / "keys.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = lockstep(
        configured,
        "train",
        "c.yaml",
        "data.tokenizer=strict",
        "data.train=keys.jsonl",
        "run.name=keys",
        "train.steps=1",
    )
    text = told(done)
    assert done.returncode == 0 and text.count("neither the chat template nor Lockstep") == 1, text
    assert "uses some keys of messages: mood, name, tool_calls" in text, text


def test_other_turns_are_another_recipe(configured):
    def run(*settings):
        return lockstep(configured, "train", "c.yaml", "data.tokenizer=qwen3", "run.name=turns", *settings)

    assert run().returncode == 0
    refused = run("train.steps=6", "data.turns=last")
    assert refused.returncode == 2 and "data.turns: 'all' in the checkpoint, 'last' now" in told(refused), told(refused)


TOOLS = "{% if tools %}{{ '<|start|>tools\n' + tools[0].function.name + '<|stop|>\n' }}{% endif %}" + QWEN3


def test_a_server_gives_the_template_what_training_gives_it(tmp_path):
    """Parts, names, calls of functions and their schemas, by both protocols: as many tokens as plain transformers."""
    lines = (json.dumps({"messages": CHATS[n % 3], "user": f"u{n}"}) for n in range(240))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    theirs = templated(tmp_path, TOOLS).template.tokenizer
    config = {
        "data": {"kind": "chat", "train": "chats.jsonl", "context": 128, "tokenizer": str(tmp_path / "tokenizer")},
        "model": {"kind": "gpt", "layers": 1, "width": 16, "heads": 2},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 4},
        "evaluate": {"sample_tokens": 0},
        "launch": {"processes": 1},
        "run": {"name": "r"},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    done = lockstep(tmp_path, "train", "c.yaml")
    assert done.returncode == 0, told(done)
    (tmp_path / "gone.csv").write_text("user\nu1\n")
    done = lockstep(tmp_path, "train", "c.yaml", "run.name=other", "data.exclude=gone.csv")
    assert done.returncode == 2 and "the chat template makes several samples of some chats" in done.stderr
    tools = [{"type": "function", "function": {"name": "count", "parameters": {}}}]
    parts = ASK | {"content": [{"type": "text", "text": "one or "}, {"type": "text", "text": "two?"}], "name": "Ann"}
    with serving(tmp_path / "runs" / "r") as server:
        for messages, given in (([ASK], [parts]), ([ASK, CALL, FOUND], [parts, CALL, FOUND | {"tool_call_id": "1"}])):
            for schemas in (None, tools):
                wanted = theirs.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, tokenize=True)
                body = {"messages": given, "tools": schemas, "max_tokens": 1}
                own = server.post("/generate", json=body).json()
                answer = server.post("/v1/chat/completions", json=body)
                count = len(wanted["input_ids"])
                assert (own["prompt_tokens"], answer.json()["usage"]["prompt_tokens"]) == (count, count)
                assert "x-ignored-fields" not in answer.headers
        for wrong in (ASK | {"content": None}, ASK | {"content": [{"type": "image_url", "image_url": "x"}]}):
            refused = server.post("/generate", json={"messages": [wrong]})
            assert refused.status_code == 422 and "message 1 has" in refused.json()["error"], refused.text
    loaded = load(tmp_path / "runs" / "r")
    assert loaded.generate([parts], tools=tools, max_tokens=1).prompt_tokens == len(
        theirs.apply_chat_template([ASK], tools=tools, add_generation_prompt=True, tokenize=True)["input_ids"]
    )
    shared = {"conversations": [{"from": "human", "value": "a"}]}
    for number, row in enumerate([{"messages": [parts]}, {"messages": [parts], "tools": tools}, shared]):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row))
        done = lockstep(tmp_path, "predict", "runs/r", f"{number}.jsonl", "--out", "out.jsonl", "--max-tokens", "8")
        assert done.returncode == 0, told(done)
        asked = row.get("messages") or [{"role": "user", "content": "a"}]
        answer = loaded.generate(asked, tools=row.get("tools"), max_tokens=8, temperature=0)
        assert json.loads((tmp_path / "out.jsonl").read_text()) == {**row, "completion": answer.text}
    (tmp_path / "bad.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}))
    refused = lockstep(tmp_path, "predict", "runs/r", "bad.jsonl", "--out", "out.jsonl")
    assert refused.returncode == 2 and "line 1 of bad.jsonl: every message is of the assistant" in told(refused)
    done = lockstep(tmp_path, "evaluate", "runs/r", "--file", "chats.jsonl", "--to", "evaluation")
    assert done.returncode == 0 and "perplexity" in done.stdout, told(done)
