"""Tokenizers with more tokens than the model has embeddings: refused, or the embeddings are resized, alike everywhere."""

import json

import pytest
import torch
from running import lockstep
from tokenizer_files import LINES, byte_level
from tokenizers import Tokenizer
from training_runs import trained
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.core.numerics.seeds import seed_all
from lockstep.models import _causal_lm as causal_lm
from lockstep.models import _transformer as transformer

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LM = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},  # tied
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},  # its output layer has a bias
    "llama": SIZES,
    "opt": {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16},
}
SHORT = ["train.steps=3", "train.global_batch=8", "train.micro_batch=2", "optim.lr=0.01", "evaluate.sample_tokens=0"]


def saved(folder, auto_class, kind, **sizes):
    """A model without a row for the padding token that its tokenizer has got -> its number of rows."""
    made = byte_level()
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    ids = {"vocab_size": len(theirs), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    torch.manual_seed(0)
    network = auto_class.from_config(AutoConfig.for_model(kind, **ids, max_position_embeddings=64, **sizes))
    for name, bias in network.named_parameters():
        if name == "lm_head.bias":
            torch.nn.init.normal_(bias)
    network.save_pretrained(folder)
    theirs.add_special_tokens({"pad_token": "[PAD]"})
    theirs.save_pretrained(folder)
    return len(theirs) - 1


def built(folder, rows, **settings):
    config = causal_lm.Config(kind="causal_lm", name=str(folder), **settings)
    seed_all(7)
    return causal_lm.build(config, DataSpec(modality="tokens", vocabulary=rows, context=16))


@pytest.mark.parametrize("kind", LM)
def test_rows_are_added_to_a_language_model(tmp_path, kind):
    rows = saved(tmp_path, AutoModelForCausalLM, kind, **LM[kind])
    before = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"embeddings of {rows} tokens, but .* {rows + 1}: set model.resize_embedd"):
        built(tmp_path, rows + 1)
    model, again = (built(tmp_path, rows + 1, resize_embeddings=True) for _ in range(2))
    network = model.network
    inner, outer = network.get_input_embeddings(), network.get_output_embeddings()
    assert (outer.weight is inner.weight) == (kind in ("gpt2", "opt"))
    for layer, own in ((inner, before.get_input_embeddings()), (outer, before.get_output_embeddings())):
        known, new = own.weight, layer.weight[rows:]
        assert layer.weight.shape == (rows + 1, 16) and torch.equal(layer.weight[:rows], known)
        assert ((new - known.mean(0)).abs() < 5 * known.std(0)).all() and new.std() > 0.1 * known.std()
        if getattr(own, "bias", None) is not None:
            assert torch.equal(layer.bias[:rows], own.bias) and torch.allclose(layer.bias[rows], own.bias.mean())
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    assert f"the embeddings have rows for {rows} tokens: 1 are added" in " ".join(model._lockstep_notes)
    model.save(tmp_path / "e")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "e").eval()
    tokens = torch.tensor([[rows, 3, rows - 1]])
    assert read.config.vocab_size == rows + 1
    assert torch.equal(read(input_ids=tokens).logits, model.eval()({"input_ids": tokens}))
    assert built(tmp_path, rows, resize_embeddings=True).network.config.vocab_size == rows  # nothing lacks


def refusal(folder, *words):
    done = lockstep(folder, "train", "c.yaml", *SHORT, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stdout + done.stderr


STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "pipeline": 2}


def digests_of(ranks, folder):
    """Of a run on each strategy, with its name."""
    found = set()
    for kind, count in STRATEGIES.items():
        words = ["model.resize_embeddings=true", f"parallel.kind={kind}", f"launch.processes={count}"]
        found.add(trained(ranks, folder / "c.yaml", kind, *SHORT, *words)["digest"])
    return found


@pytest.mark.timeout(300)
def test_a_language_model_on_each_strategy(ranks, tmp_path):
    rows = saved(tmp_path / "base", AutoModelForCausalLM, "llama", **SIZES)
    (tmp_path / "t.txt").write_text("\n".join(LINES * 30))
    (tmp_path / "c.yaml").write_text(
        "data: {kind: text, train: t.txt, context: 16}\nmodel: {kind: causal_lm, name: base}"
    )
    refused = refusal(tmp_path)
    assert "Traceback" not in refused and "model.resize_embeddings=true" in refused and "data.tokenizer" in refused
    resized = "model.resize_embeddings=true"
    digests = digests_of(ranks, tmp_path)
    assert len(digests) == 1
    other = trained(ranks, tmp_path / "c.yaml", "seed", *SHORT, resized, "run.seed=1", "launch.processes=1")
    assert other["digest"] not in digests
    exported = lockstep(tmp_path, "export", "runs/ddp", "--to", "e")
    assert exported.returncode == 0, exported.stdout + exported.stderr
    model, tokenizer = (each.from_pretrained(tmp_path / "e") for each in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.vocab_size == len(tokenizer) == rows + 1
    adapter = refusal(tmp_path, resized, "model.adapter={kind: lora}")
    assert "resize_embeddings does not go with model.adapter" in " ".join(adapter.split())


@pytest.mark.timeout(300)
def test_a_classifier_on_each_strategy(ranks, tmp_path):
    """Its padding is the new token; the export answers in plain transformers as it does."""
    import lockstep as package

    rows = saved(tmp_path / "base", AutoModelForSequenceClassification, "bert", **SIZES)
    (tmp_path / "t.csv").write_text(
        "text,label\n" + "".join(f"{LINES[n % 2][: n + 5]},{'ab'[n % 2]}\n" for n in range(30))
    )
    (tmp_path / "c.yaml").write_text(
        "data: {kind: files, train: t.csv, test: t.csv}\nmodel: {kind: transformer, name: base, max_length: 16}"
    )
    refused = refusal(tmp_path)
    assert "Traceback" not in refused and f"embeddings of {rows} tokens, but the tokenizer" in " ".join(refused.split())
    assert len(digests_of(ranks, tmp_path)) == 1
    exported = lockstep(tmp_path, "export", "runs/fsdp", "--to", "e")
    assert exported.returncode == 0, exported.stdout + exported.stderr
    model, tokenizer = (
        each.from_pretrained(tmp_path / "e") for each in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    given = tokenizer(["the fox", "a dog runs away"], padding=True, return_tensors="pt")
    assert model.config.vocab_size == rows + 1 and rows in given.input_ids
    expected = model.eval()(**given).logits.softmax(-1)
    found = [each.probabilities for each in package.load(tmp_path / "e").predict(["the fox", "a dog runs away"])]
    assert torch.allclose(torch.tensor([[*each.values()] for each in found]), expected, atol=1e-5)


@pytest.mark.parametrize("more", [[], ["model.from_config=true"]])
def test_numbers_of_tokens_may_have_holes(ranks, tmp_path, more):
    saved(tmp_path / "base", AutoModelForCausalLM, "llama", **SIZES)
    state = json.loads((tmp_path / "base" / "tokenizer.json").read_text())
    state["added_tokens"].pop()  # the padding token
    vocabulary, last = state["model"]["vocab"], max(state["model"]["vocab"].values())
    gone = {token for token, id in vocabulary.items() if id > 280 and id % 7 == 0 and id != last}
    state["model"]["vocab"] = {token: id for token, id in vocabulary.items() if token not in gone}
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if not {"".join(pair), *pair} & gone]
    made = Tokenizer.from_str(json.dumps(state))
    assert gone and made.get_vocab_size() <= last
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path / "base")
    (tmp_path / "t.txt").write_text("\n".join(LINES * 30))
    (tmp_path / "c.yaml").write_text(
        "data: {kind: text, train: t.txt, context: 16}\nmodel: {kind: causal_lm, name: base}"
    )
    trained(ranks, tmp_path / "c.yaml", "holes", *SHORT, "launch.processes=1", *more)


def test_a_tokenizer_of_words_is_checked_too(tmp_path):
    rows = saved(tmp_path, AutoModelForSequenceClassification, "bert", **SIZES)
    config = transformer.Config(kind="transformer", name=str(tmp_path), max_length=16)
    with pytest.raises(ModelError, match=f"embeddings of {rows} tokens, but the tokenizer beside it has {rows + 1}"):
        transformer.PretrainedTokenizer(config)
