"""What a model answers to a text does not depend on the texts beside it, and is that of plain transformers."""

import csv

import numpy as np
import pytest
import torch
from members import further
from running import lockstep
from tokenizer_files import LINES, saved

import lockstep as package
from lockstep.base.contracts import DataSpec
from lockstep.inference.generation import decoding
from lockstep.models._causal_lm import CausalTransformer

TEXTS = ["the dog", "the quick brown fox jumps over the lazy dog and runs away, quick as the wind", "a fox", "it jumps"]
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
KINDS = {
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
    "fnet": {**SIZES, "max_position_embeddings": 128},
    "bert": {**SIZES, "max_position_embeddings": 128},
}


def model_in(folder, kind, **sizes):
    """A body of transformers and its tokenizer, of which every token matters."""
    from transformers import AutoConfig, AutoModel

    tokenizer = saved(folder, "Llama 3")
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    model = AutoModel.from_config(settings)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.ndim > 1 else 1)
    model.save_pretrained(folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "labels"), [("xlnet", "class"), ("fnet", "class"), *further(("fnet", "tags"), ("bert", "class"))]
)
def test_alone_as_together(tmp_path, kind, labels):
    """XLNet reads what stands last; FNet mixes all tokens of a row, also those of padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model_in(tmp_path / "m", kind, **KINDS[kind])
    with (tmp_path / "t.csv").open("w", newline="") as file:
        rows = [(line, ("a", "b")[n % 2] if labels == "class" else " ".join("abab"[n % 2] for _ in line.split()))
                for n, line in enumerate(LINES * 8)]  # fmt: skip
        csv.writer(file).writerows([("text", "label"), *rows])
    (tmp_path / "c.yaml").write_text(
        f"data: {{kind: files, train: t.csv, labels: {labels}}}\nmodel: {{kind: transformer, name: m, max_length: 40}}\n"
        "train: {steps: 3, global_batch: 8, micro_batch: 4}\noptim: {lr: 0.001}\nparallel: {find_unused: true}\n"
    )
    done = lockstep(tmp_path, "train", "c.yaml", "run.name=r", "launch.processes=1", "parallel.kind=ddp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("padding changes the outputs" in done.stdout) == (kind == "fnet")
    done = lockstep(tmp_path, "export", "runs/r", "--to", "e")
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in ("runs/r", "e"):
        model = package.load(tmp_path / folder)
        assert model.model.bears_padding == (kind != "fnet")
        if labels == "tags":
            assert model.predict(TEXTS) == [model.predict(text) for text in TEXTS]
            continue
        together = [each.probabilities for each in model.predict(TEXTS)]
        alone = [model.predict(text).probabilities for text in TEXTS]
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "e")
        network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "e").eval()
        with torch.no_grad():
            logits = [network(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
        theirs = torch.stack(logits).softmax(-1).numpy()
        for found in (together, alone):
            table = [[row[label] for label in ("a", "b")] for row in found]
            assert np.allclose(table, theirs, atol=1e-5)
        assert np.ptp([row["a"] for row in alone]) > 1e-3  # what is read matters


@pytest.mark.parametrize("kind", ["bart", "roberta", "openai-gpt", "llama", "opt", "lfm2", "minimax"])
def test_a_decoder_that_cannot_be_cached_is_read_anew(kind):
    """Also where positions count from the padding, prompts have the answers that they have alone in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    bart = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
    mixed = {**SIZES, "num_key_value_heads": 2}
    mixed = {"lfm2": {**mixed, "layer_types": ["conv", "full_attention"]},
             "minimax": {**mixed, "head_dim": 16, "num_local_experts": 2, "layer_types": ["full_attention", "linear_attention"]}}  # fmt: skip
    sizes = {**mixed, "bart": bart, "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}}.get(
        kind, SIZES
    )
    own = {"is_decoder": True} if kind in ("bart", "roberta") else {}
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, vocab_size=257, max_position_embeddings=64, **own, **sizes)
    network = AutoModelForCausalLM.from_config(settings).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    model = CausalTransformer(network, DataSpec(modality="tokens", vocabulary=257)).eval()
    caches = decoding.caches_well(model, 64, torch.device("cpu"))
    assert caches == (kind in ("llama", "opt"))
    made = decoding.decoding_of(model, 64, torch.device("cpu"), caches=caches)
    rows = [[5, 6, 7, 8, 9, 10, 11], [65], [3, 4]]
    with torch.inference_mode():
        made.join(rows)
        for _ in range(6):
            alone = torch.stack([network(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])
            assert torch.allclose(made.logits, alone, atol=1e-4 * float(alone.abs().max()))
            tokens = alone.argmax(-1).tolist()
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
            made.read(tokens)
