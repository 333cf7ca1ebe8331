"""OpenAI's protocol, asked by the real `openai` package."""

import json

import httpx
import openai
import pytest
from running import lockstep
from served import serving

ASK, THANK = {"role": "user", "content": "one or two?"}, {"role": "user", "content": "thanks \u00e9"}
ANSWERS = {"one or two?": "two", "thanks \u00e9": "you are welcome"}
GREEDY = {"temperature": 0, "max_tokens": 30}


def chat_of(message):
    return {"messages": [message, {"role": "assistant", "content": ANSWERS[message["content"]]}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model that knows two answers by heart."""
    folder = tmp_path_factory.mktemp("openai")
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(chat_of((ASK, THANK)[n % 2])) for n in range(200)))
    config = {
        "run": {"name": "r"},
        "data": {"kind": "chat", "train": "chats.jsonl", "context": 64},
        "model": {"kind": "gpt", "layers": 2, "width": 32, "heads": 2},
        "train": {"steps": 120, "global_batch": 16, "micro_batch": 16},
        "optim": {"lr": 0.01},
        "evaluate": {"sample_tokens": 0},
        "launch": {"processes": 1},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    for command in (("train", "c.yaml"), ("export", "runs/r", "--to", "export")):
        done = lockstep(folder, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    with serving(folder / "export", "--queue", "8") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def name(client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    return model.id


def test_a_chat(server, client, name):
    made = client.chat.completions.create(model=name, messages=[ASK], n=2, seed=5, stop="xyz", **GREEDY)
    assert [choice.message.content for choice in made.choices] == ["two", "two"]
    assert [choice.finish_reason for choice in made.choices] == ["stop", "stop"]
    own = server.post("/generate", json={"messages": [ASK], **GREEDY}).json()
    assert made.usage.completion_tokens == 2 * own["tokens"]
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.usage.prompt_tokens == len("user: one or two?\nassistant: ")  # a model of bytes
    cut = client.chat.completions.create(model=name, messages=[ASK], temperature=0, max_completion_tokens=1)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("t", "length")
    stopped = client.chat.completions.create(model=name, messages=[THANK], stop=[" are"], **GREEDY)
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("you", "stop")


def test_what_clients_send_beside_it(client, name):
    """Parts, roles and names are taken; what means nothing here is named."""
    said = [{"type": "text", "text": "one or "}, {"type": "text", "text": "two?"}]
    raw = client.chat.completions.with_raw_response.create(
        model=name, messages=[{"role": "user", "content": said}], presence_penalty=0.5, user="me",
        extra_body={"top_k": 3}, **GREEDY,
    )  # fmt: skip
    assert raw.parse().choices[0].message.content == "two"
    assert set(raw.headers["x-ignored-fields"].split(", ")) == {"presence_penalty", "user", "top_k"}
    schemas = [{"type": "function", "function": {"name": "count", "parameters": {}}}]
    raw = client.chat.completions.with_raw_response.create(model=name, messages=[ASK], tools=schemas, **GREEDY)
    assert raw.headers["x-ignored-fields"] == "tools", "the plain template has none"
    plain = client.chat.completions.with_raw_response.create(model=name, messages=[ASK], **GREEDY)
    assert "x-ignored-fields" not in plain.headers


def test_a_stream(client, name):
    asked = {"model": name, "messages": [THANK], "n": 2, "stream": True, **GREEDY}
    texts, finished = ["", ""], {}
    *chunks, last = list(client.chat.completions.create(**asked, stream_options={"include_usage": True}))
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finished[choice.index] = choice.finish_reason
    assert texts == ["you are welcome"] * 2 and finished == {0: "stop", 1: "stop"}
    assert len(chunks) > 6 and last.choices == [] and last.usage.completion_tokens > 10
    assert chunks[0].choices[0].delta.role == "assistant"


def test_a_completion(server, client, name):
    """Of a text as it is, not as what a user says."""
    asked = [f"user: {each['content']}\nassistant: " for each in (ASK, THANK)]
    both = client.completions.create(model=name, prompt=asked, **GREEDY)
    assert [choice.text for choice in both.choices] == ["two", "you are welcome"]
    assert both.usage.prompt_tokens == len("".join(asked).encode())
    pieces = client.completions.create(model=name, prompt=asked[0], stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in pieces) == "two"
    drawn = [
        client.completions.create(model=name, prompt="x", seed=-3, max_tokens=20).choices[0].text for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"model": "gpt-5"}, "NotFoundError", "this server has r, and no 'gpt-5'"),
        ({"messages": []}, "BadRequestError", "messages: list should have at least 1 item"),
        ({"temperature": -1}, "BadRequestError", "temperature: input should be greater than or equal to 0"),
        (
            {"response_format": {"type": "json_object"}},
            "BadRequestError",
            'response_format: {"type": "json_object"} is',
        ),
        ({"n": 9}, "BadRequestError", "n: this server generates 8 completions at a time"),
        ({"logprobs": True}, "BadRequestError", "logprobs: true is not supported: leave it out"),
        ({"tool_choice": "required"}, "BadRequestError", 'tool_choice: "required" is not supported'),
        ({"messages": [{"role": "user"}]}, "BadRequestError", "messages.0.content: is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "BadRequestError",
            "message 1 has a part of the type 'image_url': only parts that are texts are read",
        ),
    ],
)
def test_mistakes(client, name, change, kind, says):
    asked = {"model": name, "messages": [ASK], **GREEDY, **change}
    with pytest.raises(getattr(openai, kind)) as error:
        client.chat.completions.create(**asked)
    assert says in error.value.body["message"], error.value.body
    assert error.value.code == ("model_not_found" if kind == "NotFoundError" else None)
    assert error.value.body["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long(client, name):
    asked = {"model": name, "messages": [{"role": "user", "content": "x" * 5000}], **GREEDY}
    with pytest.raises(openai.BadRequestError, match="more than the") as error:
        client.chat.completions.create(**asked)
    assert error.value.code == "context_length_exceeded"
    answer = client.chat.completions.create(**asked, extra_body={"truncate": True})
    assert answer.choices[0].finish_reason and answer.truncated
    assert all(
        each.truncated for each in client.chat.completions.create(**asked, stream=True, extra_body={"truncate": True})
    )
    assert not hasattr(
        client.chat.completions.create(**asked | {"messages": [{"role": "user", "content": "x"}]}), "truncated"
    )


def test_names_of_ignored_fields_cannot_break_the_header(server):
    body = {"messages": [ASK], "wide \u2603\n": 1, **GREEDY}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "wide%20%E2%98%83%0A"
