"""Prompts and completions that are longer than a model reads: said, never cut in silence."""

import csv
import json

import pytest
import torch
from running import lockstep
from served import serving
from tokenizer_files import saved

import lockstep as package
from lockstep.base.errors import DataError
from lockstep.data.chat import ChatTokenizer
from lockstep.inference import trained_model
from lockstep.inference.generation.decoding import KEPT
from lockstep.inference.generation.sampling import Sampling

CONTEXT, POSITIONS = 32, 96
LONG = " ".join(["the fox jumps over the lazy dog"] * 20)
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of more positions than it is trained with, as a run and an export, and a gpt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("long")
    tokenizer = saved(folder / "base", "Llama 2")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, **sizes)
    LlamaForCausalLM(settings).save_pretrained(folder / "base")
    (folder / "t.txt").write_text("\n".join(f"{LONG} {WORDS} {number}" for number in range(20)))
    (folder / "w.txt").write_text(f"{WORDS}\n" * 200)
    train = "train: {steps: %d, global_batch: 8, micro_batch: 8}\noptim: {lr: 0.01}\nevaluate: {sample_tokens: 0}\n"
    (folder / "llama.yaml").write_text(
        f"data: {{kind: text, train: t.txt, context: {CONTEXT}}}\nmodel: {{kind: causal_lm, name: base}}\n{train % 3}"
    )
    (folder / "gpt.yaml").write_text(
        f"data: {{kind: text, train: w.txt, context: {CONTEXT}}}\n"
        f"model: {{kind: gpt, layers: 2, width: 48, heads: 4}}\n{train % 150}"
    )
    for name in ("llama", "gpt"):
        done = lockstep(folder, "train", f"{name}.yaml", f"run.name={name}", "launch.processes=1")
        assert done.returncode == 0, done.stdout + done.stderr
        done = lockstep(folder, "export", f"runs/{name}", "--to", f"{name}.export")
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def count(generator, prompt):
    return len(generator.completion(prompt, Sampling(truncate=True)).prompt)


def test_a_model_of_transformers_reads_as_far_as_it_has_positions(folder):
    """Not only as far as data.context, as transformers reads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder / "llama.export")
    network = AutoModelForCausalLM.from_pretrained(folder / "llama.export").eval()
    loaded = package.load(folder / "llama.export")
    prompt = LONG[:200]
    given = theirs(prompt, return_tensors="pt")
    size = given["input_ids"].shape[1]
    assert CONTEXT < size < POSITIONS - 10
    for asked in (10, POSITIONS):
        made = network.generate(**given, max_length=min(size + asked, POSITIONS), do_sample=False, pad_token_id=1)[0]
        found = loaded.generate(prompt, max_tokens=asked, temperature=0)
        assert prompt + found.text == theirs.decode(made, skip_special_tokens=True)
        assert (found.prompt_tokens, found.truncated, found.finish) == (size, False, "length")
        assert found.tokens == min(asked, POSITIONS - size)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_longer_prompt_is_refused_with_both_numbers_or_cut_as_asked(folder, name):
    generator = trained_model.open_predictor(folder / f"{name}.export")
    most = {"llama": POSITIONS, "gpt": CONTEXT}[name]
    assert generator.context == most
    (whole,) = [each.tolist() for each in generator.tokenizer([LONG])]
    begin = generator.tokenizer.begin
    assert begin == ([0] if name == "llama" else [])
    said = f"the prompt has {len(whole) + len(begin):,} tokens, more than the {most:,} that the model reads"
    with pytest.raises(DataError, match=f"^{said}: shorten it, or set truncate=true"):
        generator.completion(LONG, Sampling())
    for room in (4, 4000):
        made = generator.completion(LONG, Sampling(truncate=True, max_tokens=room))
        size = max(most - room, int(most * KEPT))
        assert made.prompt == [*begin, *whole[len(begin) - size :]] and made.is_truncated
    (exact,) = [generator.tokenizer.decode(whole[: most - len(begin)])]
    fits = generator.completion(exact, Sampling(truncate=True))
    assert len(fits.prompt) == most and not fits.is_truncated
    (made,) = generator.complete([exact], Sampling(max_tokens=3, temperature=0))
    assert made.finish and len(made.tokens) == (1 if name == "llama" else 3)


def test_a_chat_does_not_lose_its_first_message(folder):
    generator = trained_model.open_predictor(folder / "llama.export")
    chats = trained_model.generator(
        generator.facts, generator.forward, ChatTokenizer(generator.tokenizer), device=generator.device
    )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": LONG}]
    with pytest.raises(DataError, match="the prompt has .* tokens, more than the 96 that the model reads"):
        chats.completion(messages, Sampling())
    made = chats.completion(messages, Sampling(truncate=True))
    assert made.is_truncated and made.prompt[0] == 0 and len(made.prompt) == POSITIONS * KEPT


def test_a_server_tells_so(folder):
    with serving(folder / "llama.export") as server:
        assert server.get("/info").json()["limits"]["context"] == POSITIONS
        refused = server.post("/generate", json={"prompt": LONG})
        assert refused.status_code == 422 and f"more than the {POSITIONS}" in refused.json()["error"]
        asked = {"prompt": LONG, "truncate": True, "max_tokens": 5, "temperature": 0}
        whole = server.post("/generate", json=asked).json()
        assert (whole["truncated"], whole["prompt_tokens"], whole["tokens"]) == (True, POSITIONS - 5, 5)
        with server.client.stream("POST", "/generate", json=asked | {"stream": True}) as response:
            events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
        assert events[-1]["truncated"] and events[-1]["prompt_tokens"] == POSITIONS - 5
        short = server.post("/generate", json={**asked, "prompt": "the fox"}).json()
        assert not short["truncated"] and short["prompt_tokens"] < 8


@pytest.mark.parametrize("processes", [1, 2])
def test_predict_tells_so(folder, processes):
    """With a pool of processes, each of which gets rows, as in one."""
    rows = [LONG, "the fox", LONG] * (1 if processes == 1 else 200)
    with (folder / "p.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([row] for row in rows)])
    out = f"o{processes}.csv"
    done = lockstep(
        folder, "predict", "runs/llama", "p.csv", "--out", out, "--max-tokens", "2", "--processes", str(processes)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    number = f"{2 * len(rows) // 3:,}"
    assert f"{number} prompts are longer than the model's context: their beginnings are cut off" in done.stdout
    with (folder / out).open(newline="") as file:
        found = [*csv.DictReader(file)]
    assert [row["text"] for row in found] == rows and all(row["completion"] for row in found[:3])


def test_a_gpt_goes_on_beyond_its_context_as_if_it_began_there(folder):
    """Beside plain forward passes over the last tokens; alone and beside a shorter text. It stays with its words."""
    generator = trained_model.open_predictor(folder / "gpt.export")
    greedy = Sampling(max_tokens=5 * CONTEXT, temperature=0)
    prompts = ["alpha beta ", "theta", " "]
    together = [each.text for each in generator.complete(prompts, greedy)]
    for prompt, text in zip(prompts, together, strict=True):
        (alone,) = generator.complete([prompt], greedy)
        assert alone.text == text
        window, tokens = list(alone.prompt), []
        for _ in range(greedy.max_tokens):
            with torch.inference_mode():
                token = int(generator.forward({"input_ids": torch.tensor([window])})[0, -1].argmax())
            tokens.append(token)
            window.append(token)
            if len(window) > CONTEXT:
                window = window[-int(CONTEXT * KEPT) :]
        assert alone.tokens == tokens
        words = text.split()[1:-1]
        assert len(words) > 20 and sum(word in WORDS.split() for word in words) > 0.9 * len(words), text
