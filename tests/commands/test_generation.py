"""Completions: with a cache and without, together and alone, in a table, by a server, at evaluations."""

import json
import threading
from dataclasses import replace

import httpx
import pyarrow.parquet as pq
import pytest
import torch
from running import lockstep, summary
from served import serving

from lockstep.base.contracts import DataSpec
from lockstep.data.text_tokenizers import Bytes
from lockstep.inference import trained_model
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.generation import decoding
from lockstep.inference.generation.generator import Completion, GeneratedBatch, Generator
from lockstep.inference.generation.sampling import Sampling, next_token

PROMPTS = ["The lambda ", "Sequence types", "A", "caf\u00e9 ", ""]
GREEDY = Sampling(max_tokens=40, temperature=0)
CONTEXT = 48
CONFIG = {
    "data": {"kind": "text", "context": CONTEXT},
    "model": {"kind": "gpt", "layers": 2, "width": 32, "heads": 2},
    "train": {"steps": 40, "global_batch": 16, "micro_batch": 8},
    "optim": {"lr": 0.01},
    "evaluate": {"every_steps": 20, "sample_tokens": 20},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on the help texts of Python, and its export."""
    folder = tmp_path_factory.mktemp("generation")
    (folder / "c.yaml").write_text(json.dumps(CONFIG))
    train(folder, "run.name=r", "launch.processes=1")
    done = lockstep(folder, "export", "runs/r", "--to", "export")
    assert done.returncode == 0 and "the same weights bit for bit" in done.stdout, done.stdout + done.stderr
    return folder


def train(folder, *settings):
    done = lockstep(folder, "train", "c.yaml", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def generator(folder):
    return trained_model.open_predictor(folder / "export")


def texts_of(generator, prompts, sampling):
    return [(each.text, each.finish) for each in generator.complete(prompts, sampling)]


def test_together_alone_and_without_a_cache(generator, monkeypatch):
    """Also beyond the context, where the oldest tokens are forgotten, the text of a row does not depend on others."""
    together = texts_of(generator, PROMPTS, replace(GREEDY, max_tokens=2 * CONTEXT))
    assert together == [texts_of(generator, [prompt], replace(GREEDY, max_tokens=2 * CONTEXT))[0] for prompt in PROMPTS]
    within = texts_of(generator, PROMPTS, replace(GREEDY, max_tokens=20))
    monkeypatch.setattr(
        "lockstep.inference.generation.generator.decoding_of",
        lambda forward, context, device, *, caches: decoding.RecomputedDecoding(forward, context, device),
    )
    assert within == texts_of(generator, PROMPTS, replace(GREEDY, max_tokens=20))


def test_a_text_that_grows_is_read_in_few_lengths():
    """A processor's kernels are compiled, and kept, for each: 256 MiB for the 100 tokens of a small GPT in bf16."""
    lengths = []

    def forward(batch):
        lengths.append(batch["input_ids"].shape[1])
        return batch["input_ids"][..., None].float()

    made = decoding.RecomputedDecoding(forward, 100, torch.device("cpu"))
    made.join([[*range(20)], [1]])
    for token in range(110):
        made.read([token, token])
        assert made.logits.tolist() == [[token], [token]]
    assert [*dict.fromkeys(lengths)] == [32, 64, 96, 100]


def test_rows_join_and_leave(generator):
    expected = texts_of(generator, PROMPTS, GREEDY)
    batch, rows = GeneratedBatch(generator), [generator.completion(prompt, GREEDY) for prompt in PROMPTS]
    for number, row in enumerate(rows):
        batch.join([row])
        for _ in range(3 + number):
            batch.step()
    given_up = generator.completion("given up", GREEDY)
    batch.join([given_up])
    batch.step()
    batch.drop([given_up])
    while batch.rows:
        batch.step()
    assert [(row.text, row.finish) for row in rows] == expected
    assert len(given_up.tokens) == 1


def test_a_seed_gives_the_text_again(generator):
    sampling = Sampling(max_tokens=30, seed=7)
    assert texts_of(generator, PROMPTS, sampling) == texts_of(generator, PROMPTS, sampling)
    assert texts_of(generator, PROMPTS, sampling) != texts_of(generator, PROMPTS, replace(sampling, seed=8))


def test_probable_tokens_alone_are_drawn():
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    drawn = {
        top_p: {
            next_token(logits, Sampling(temperature=1, top_p=top_p), torch.Generator().manual_seed(n))
            for n in range(99)
        }
        for top_p in (1.0, 0.79, 0.5, 1e-6)
    }
    assert drawn == {1.0: {0, 1, 2, 3}, 0.79: {0, 1}, 0.5: {0}, 1e-6: {0}}
    hot = [next_token(logits, Sampling(temperature=9), torch.Generator().manual_seed(n)) for n in range(400)]
    assert hot.count(3) > 60  # nearly even


class Scripted:
    """A decoding that gives these tokens, one after the other."""

    def __init__(self, tokens):
        self.tokens, self.place = tokens, 0
        self.logits = self.of(0)

    def of(self, place):
        return torch.nn.functional.one_hot(torch.tensor([self.tokens[place]]), 257).float() * 50

    def join(self, prompts):
        pass

    def keep(self, rows):
        pass

    def read(self, tokens):
        self.place += 1
        self.logits = self.of(self.place)


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("one. two", (". ",), ("one", "stop")),
        ("one. two", ("xx", "tw"), ("one. ", "stop")),
        ("one.\u0101", (), ("one.\u0101", "end")),
        ("\u0101\u0101", ("\u0101\u0101\u0101",), ("\u0101\u0101", "end")),
    ],
)
def test_stop_texts_and_whole_characters(generator, text, stop, expected):
    """Text of a completion that was sent while it is made is never taken back."""
    batch = GeneratedBatch(generator)
    row = Completion(prompt=[65], sampling=Sampling(max_tokens=99, temperature=0, stop=stop))
    batch.rows, batch.decoding = [row], Scripted([*text.encode(), 256])
    told = [""]
    while not row.finish:
        batch.step()
        assert row.text.startswith(told[-1]) and "\ufffd" not in row.text
        told.append(row.text)
    assert (row.text, row.finish) == expected


@pytest.mark.timeout(200)
def test_the_texts_of_evaluations_do_not_depend_on_the_cluster(folder):
    def texts(name):
        lines = map(json.loads, (folder / "runs" / name / "history.jsonl").read_text().splitlines())
        return {line["step"]: line["texts"] for line in lines if line["kind"] == "texts"}

    expected = texts("r")
    assert [*expected] == [0, 20, 40] and expected[20] != expected[40]
    assert all(len(prompt) == 24 and text for each in expected.values() for prompt, text in each)
    brief = ["train.steps=16", "evaluate.every_steps=8"]
    for kind, processes in (("single", 1), ("ddp", 3), ("fsdp", 2), ("pipeline", 2)):
        out = train(folder, *brief, f"run.name={kind}", f"parallel.kind={kind}", f"launch.processes={processes}")
        assert [*texts(kind)] == [0, 8, 16] and texts(kind) == texts("single")
        assert out.count("it writes: ") == 3
        assert summary(folder, kind)["digest"] == summary(folder, "single")["digest"]
    report = (folder / "runs" / "r" / "report.html").read_text()
    assert "Generated texts" in report and "Before training" in report and "After step 40" in report


def test_the_export_loads_with_transformers_own_tokenizer(folder, generator):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder / "export")
    text = "caf\u00e9 \U0001f600 <|end|> \n\t x"
    assert theirs(text.replace("<|end|>", "")).input_ids == [*text.replace("<|end|>", "").encode()]
    assert theirs.decode(theirs("caf\u00e9").input_ids) == "caf\u00e9"
    assert theirs.eos_token_id == generator.tokenizer.pad_id


@pytest.mark.parametrize("where", ["runs/r", "export"])
def test_run_and_export_are_measured_the_same(folder, where):
    done = lockstep(folder, "evaluate", where, "--to", "measured")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "measured" / "evaluation.json").read_text())["metrics"]
    assert found == pytest.approx(summary(folder, "r")["evaluation"], rel=1e-6)
    assert set(found) == {"loss", "perplexity", "bits_per_byte"}


def test_a_tables_column_is_completed(folder, generator):
    rows = "\n".join(["prompt", *(f"number {n}" for n in range(70))])
    (folder / "table.csv").write_text(rows)
    for processes in (1, 2):
        done = lockstep(
            folder, "predict", "export", "table.csv", "--out", f"out{processes}.parquet", "--text-column", "prompt",
            "--max-tokens", "12", "--processes", str(processes),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "out1.parquet").read_bytes() == (folder / "out2.parquet").read_bytes()
    table = pq.read_table(folder / "out1.parquet").to_pydict()
    assert list(table) == ["prompt", "completion"]
    expected = texts_of(generator, table["prompt"][:3], replace(GREEDY, max_tokens=12))
    assert table["completion"][:3] == [text for text, _ in expected]


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder / "export", "--queue", "4", "--max-batch", "3") as server:
        yield server


def test_an_answer_and_its_stream(server, generator):
    asked = {"prompt": "The lambda ", "max_tokens": 20, "seed": 3}
    whole = server.post("/generate", json=asked).json()
    ((text, finish),) = texts_of(generator, ["The lambda "], Sampling(max_tokens=20, seed=3))
    assert (whole["text"], whole["finish"], whole["seed"]) == (text, finish, 3)
    with server.client.stream("POST", "/generate", json=asked | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert "".join(event.get("text", "") for event in events) == whole["text"] and len(events) > 5
    assert events[-1] == {name: value for name, value in whole.items() if name != "text"}
    random = {server.post("/generate", json={"prompt": "x", "max_tokens": 8}).json()["seed"] for _ in range(3)}
    assert len(random) == 3
    schema = server.get("/openapi.json").json()
    assert set(schema["components"]["schemas"]["Generated"]["properties"]) == set(whole)
    assert "/predict" not in schema["paths"]


def test_a_space_of_it_answers(folder, server):
    """Served as the Space's Dockerfile says."""
    done = lockstep(folder, "export", "runs/r", "--space")
    assert done.returncode == 0, done.stdout + done.stderr
    space = folder / "runs" / "r" / "space"
    assert "A model that continues texts, with a page to try it on" in (space / "README.md").read_text()
    command = json.loads((space / "Dockerfile").read_text().split("CMD ")[-1])
    assert command[:3] == ["lockstep", "serve", "/app/model"]
    with serving(space / "model", *command[3:5]) as own:
        asked = {"prompt": "The lambda ", "max_tokens": 20, "seed": 3}
        assert own.post("/generate", json=asked).json() == server.post("/generate", json=asked).json()
        assert 'call("generate"' in own.get("/").text


@pytest.mark.parametrize(
    "body, status, says",
    [
        ({"prompt": "x", "max_tokens": 0}, 422, "max_tokens: input should be greater than or equal to 1"),
        ({"prompt": "x", "temperatur": 1}, 422, "temperatur: extra inputs are not permitted"),
        ({"text": "x"}, 422, "text: extra inputs are not permitted"),
        ({"max_tokens": 1}, 422, "give either prompt or messages"),
        ({"prompt": "x", "stop": [""]}, 422, "stop.0: string should have at least 1 character"),
        ({"prompt": "x", "top_p": 0}, 422, "top_p: input should be greater than 0"),
        ({"prompt": "\ud800"}, 422, "body: this is not json"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(server, body, status, says):
    answer = server.post("/generate", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status and says in answer.json()["error"].lower(), answer.text


def test_the_wrong_route_names_the_right_one(server):
    answer = server.post("/predict", json={"text": "x"})
    assert answer.status_code == 404 and "POST /generate" in answer.json()["error"]


def test_many_at_once_are_not_mixed_up(server, generator):
    """More than fit in a batch, and some beyond the queue."""
    prompts = [f"number {n}" for n in range(12)]
    answers = {}

    def ask(prompt):
        asked = {"prompt": prompt, "max_tokens": 60, "temperature": 1, "seed": prompts.index(prompt)}
        answers[prompt] = httpx.post(server.url + "/generate", json=asked, timeout=60)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    served = {prompt: each.json()["text"] for prompt, each in answers.items() if each.status_code == 200}
    assert {each.status_code for each in answers.values()} <= {200, 503} and len(served) >= 4
    for prompt, text in served.items():
        sampling = Sampling(max_tokens=60, temperature=1, seed=prompts.index(prompt))
        assert texts_of(generator, [prompt], sampling)[0][0] == text
    assert server.metric("lockstep_batch_size_sum") > server.metric("lockstep_batch_size_count")


def test_a_client_that_leaves_takes_its_place_with_it(server):
    with server.client.stream(
        "POST", "/generate", json={"prompt": "x", "max_tokens": 4000, "stream": True}
    ) as response:
        next(response.iter_lines())
    before = server.metric("lockstep_batch_size_count")
    assert server.post("/generate", json={"prompt": "x", "max_tokens": 5}).status_code == 200
    server.queued(0)
    after = server.metric("lockstep_batch_size_count")
    assert after - before < 2000  # it would have gone on alone


def test_a_long_answer_times_out_and_sigterm_finishes_the_rest(folder):
    endless = {"prompt": "x", "max_tokens": 4000, "temperature": 0}  # the most probable tokens repeat themselves
    with serving(folder / "export", "--timeout", "0.3") as server:
        late = server.post("/generate", json=endless)
        assert late.status_code == 504
        with server.client.stream("POST", "/generate", json=endless | {"stream": True}) as response:
            last = [line for line in response.iter_lines() if line][-1]
        assert json.loads(last.removeprefix("data: ")) == {"error": "the completion took too long"}
    with serving(folder / "export") as server:
        found = {}
        asking = threading.Thread(
            target=lambda: found.update(
                httpx.post(server.url + "/generate", json={"prompt": "x", "max_tokens": 500}, timeout=30).json()
            )
        )
        asking.start()
        while not server.metric("lockstep_batch_size_count"):
            pass
        assert server.end()[0] == 0
        asking.join()
        assert found["tokens"] == 500 or found["finish"] == "end"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "mamba"])
def test_models_of_transformers_with_their_own_caches(kind):
    """Also those whose attention reaches back some tokens only, or that keep a state instead, together with others."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lockstep.models._causal_lm import CausalTransformer

    sizes = {"vocab_size": 257, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    more = {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8, "state_size": 4}
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more))
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)  # so that each token matters
    model = CausalTransformer(network, DataSpec(modality="tokens", vocabulary=257)).eval()
    assert (kind != "mamba") == model.CACHES
    found = []
    for made in (
        decoding.decoding_of(model, 64, torch.device("cpu")),
        decoding.RecomputedDecoding(model, 64, torch.device("cpu")),
    ):
        with torch.inference_mode():
            made.join([[*range(1, 14)], [65]])
            tokens = []
            for step in range(12):
                tokens.append(made.logits.argmax(-1).tolist())
                made.read(tokens[-1])
                if step == 4:
                    made.join([[7, 8, 9]])
                if step == 8:
                    made.keep([0, 2])
        found.append(tokens)
    assert found[0] == found[1]
    facts = ExportFacts.model_construct(ends=())
    answers = Generator(facts=facts, forward=model, tokenizer=Bytes(), device=torch.device("cpu"), context=16)
    (made,) = answers.complete(["abcdef"], Sampling(max_tokens=80, temperature=0))
    assert (made.finish, len(made.prompt) + len(made.tokens)) == ("length", 16), "no token is read without the first"
