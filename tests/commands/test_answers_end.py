"""Answers end where the template ends a turn: in training, in use, and in exports as plain transformers reads them."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from members import further
from running import lockstep

from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.trained_model import open_predictor
from lockstep.models._causal_lm import settle_tokens

KNOWN = {"what colour is the sky": "blue as ever", "how many legs has a cat": "four legs", "a fruit?": "a ripe pear"}
CHATS = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in KNOWN.items()]
HEADS = "{% for m in messages %}{{ START + m['role'] + '\n' + m['content'] + STOP }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ START + 'assistant\n' }}{% endif %}"


def template(start, stop):
    return (HEADS + PROMPT).replace("START", repr(start)).replace("STOP", repr(stop))


GEMMA = template("<start_of_turn>", "<end_of_turn>\n").replace("START", "")
TEMPLATES = {
    "gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "chatml on a base model": (template("<|im_start|>", "<|im_end|>\n"), ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "chatml without its tokens": (template("<|im_start|>", "<|im_end|>\n"), [], "<|im_end|>"),
    "the next turn is the end": (template("<|user|>", ""), ["<|user|>"], "<|user|>"),
    "nothing but a line break": (template("### ", "\n"), [], ""),
}
TOKENIZERS = {"bytes": "bytes", "bpe": "bpe"}


def tokenizer(folder, chat_template, extra):
    """A byte-level tokenizer with a chat template that learned nothing but the chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>", "<bos>", *extra],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([f"{q} {a}" for q, a in KNOWN.items()] * 9, trainer)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", bos_token="<bos>", additional_special_tokens=list(extra)
    )
    theirs.chat_template = chat_template
    theirs.save_pretrained(folder)
    return theirs


def model(folder, kind, theirs, **more):
    """A tiny model whose settings know the end token alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = AutoConfig.for_model(
        kind,
        **sizes | more,
        max_position_embeddings=192,
        vocab_size=len(theirs),
        eos_token_id=theirs.eos_token_id,
        bos_token_id=theirs.bos_token_id,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(folder)


def trained(folder, data, name):
    """Learn the answers by heart -> the run; its export."""
    chats = random.Random(0).choices(CHATS, k=200)
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    config = {
        "data": {"kind": "chat", "train": "chats.jsonl", "context": 128, "documents": "apart", **data},
        "model": {"kind": "causal_lm", "name": str(folder / name), "from_config": "tokenizer" in data},
        "train": {"steps": 120, "global_batch": 8, "micro_batch": 8},
        "optim": {"lr": 0.01},
        "launch": {"processes": 1},
        "evaluate": {"sample_tokens": 0},
        "run": {"name": "r"},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    for words in (["train", "c.yaml"], ["export", "runs/r", "--to", "export"]):
        done = lockstep(folder, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "r", folder / "export"


def answered_by_transformers(export, questions):
    """Whole answers of generate() and of a pipeline, with settings as they lie in the export."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    theirs, network = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    ends = network.generation_config.eos_token_id
    ask = pipeline("text-generation", model=str(export))
    for question in questions:
        said = [{"role": "user", "content": question}]
        inputs = theirs.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = network.generate(**inputs, max_new_tokens=60, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert len(made) < 60 and int(made[-1]) in (ends if isinstance(ends, list) else [ends]), theirs.decode(made)
        text = theirs.decode(made[:-1], skip_special_tokens=True)
        (piped,) = ask(said, max_new_tokens=60, do_sample=False)
        assert piped["generated_text"][-1]["content"] == theirs.decode(made, skip_special_tokens=True)
        yield text


DAILY = ("chatml on a base model", "bytes")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [*DAILY, *further(*(each for each in [*TEMPLATES, *TOKENIZERS] if each not in DAILY))])
def test_whole_answers_in_use_and_in_plain_transformers(tmp_path, name):
    chat_template, extra, end = TEMPLATES.get(name, (None, [], ""))
    theirs = tokenizer(tmp_path / "m", chat_template, extra)
    kind = "gemma" if name == "gemma" else "llama"
    model(tmp_path / "m", kind, theirs, **{"num_key_value_heads": 1, "head_dim": 8} if kind == "gemma" else {})
    run, export = trained(tmp_path, {"tokenizer": TOKENIZERS[name]} if name in TOKENIZERS else {}, "m")
    for opened in (open_predictor(run), open_predictor(export)):
        answers = opened.complete(CHATS_ASKED, Sampling(max_tokens=60, temperature=0))
        assert [(each.text.strip(), each.finish) for each in answers] == [(a, "end") for a in KNOWN.values()]
    rows = [json.dumps({"messages": chat, "n": n}) for n, chat in enumerate([*CHATS, *CHATS_ASKED])]
    (tmp_path / "asked.jsonl").write_text("\n".join(rows))
    done = lockstep(tmp_path, "predict", "runs/r", "asked.jsonl", "--out", "said.jsonl")
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [each.pop("completion").strip() for each in said] == [*KNOWN.values()] * 2
    assert said == [*map(json.loads, rows)]
    assert '{"messages": [{"role": "user"' in (export / "README.md").read_text()
    found = [*answered_by_transformers(export, KNOWN)]
    ends = "" if end in extra else end  # as text, which only Lockstep takes for an end
    assert [text.strip().removesuffix(ends).strip() for text in found] == [*KNOWN.values()]
    settings = [json.loads((export / f"{file}.json").read_text()) for file in ("config", "generation_config")]
    assert settings[0]["eos_token_id"] == settings[1]["eos_token_id"]


CHATS_ASKED = [[{"role": "user", "content": q}] for q in KNOWN]


def test_a_padding_token_that_also_ends_texts_is_kept():
    """As in the models of Qwen: the settings that an export gets are those of its base."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    network = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=9, pad_token_id=0, eos_token_id=2, bos_token_id=None))
    network.generation_config.eos_token_id = [2, 0]
    assert settle_tokens(SimpleNamespace(network=network), ends=[2], bos=None, pad=0, kept=[0, 2]) == [2, 0]
    assert (network.config.pad_token_id, network.generation_config.pad_token_id) == (0, 0)
