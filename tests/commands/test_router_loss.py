"""The router's loss of mixtures of experts, in training as the model's own class adds it."""

import json

import pytest
import torch
from training_runs import trained

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.models import _causal_lm as causal_lm

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2, "output_router_logits": True}
KINDS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, "moe_intermediate_size": 16},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4},
}
WEIGHT = {"router_aux_loss_coef": 0.5}


def saved(folder, kind, **more):
    """A tiny mixture of experts with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    special = {"vocab_size": 260, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **{**special, **SIZES, **EXPERTS, **WEIGHT, **KINDS[kind], **more})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def built(folder):
    section = causal_lm.Config(kind="causal_lm", name=str(folder))
    return causal_lm.build(section, DataSpec(modality="tokens", vocabulary=260))


def batch(size=3, length=12):
    tokens = torch.randint(3, 260, (size, length + 1), generator=torch.Generator().manual_seed(size))
    return {"input_ids": tokens[:, :-1], "target": tokens[:, 1:].contiguous()}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_class(lone, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    model, tokens = built(saved(tmp_path / "m", kind)), batch()
    model.train()
    found = model.loss(model(tokens), tokens)
    (found.total / found.count).backward()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m").train()
    expected = theirs(input_ids=tokens["input_ids"], labels=tokens["target"], shift_labels=tokens["target"])
    expected.loss.backward()
    torch.testing.assert_close(found.total / found.count, expected.loss)
    torch.testing.assert_close(found.sums["router_loss"] / found.count, expected.aux_loss)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in model.network.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    with torch.no_grad():  # measured without it
        measured = model.eval().loss(model(tokens), tokens)
    plain = expected.loss - WEIGHT["router_aux_loss_coef"] * expected.aux_loss
    torch.testing.assert_close(measured.total / measured.count, plain.detach())
    means = {"loss": expected.loss.item(), "router_loss": expected.aux_loss.item()}
    assert model.derived(means)["perplexity"] == pytest.approx(plain.exp().item(), rel=1e-5)


def test_a_class_that_adds_none_is_told(lone, tmp_path):
    folder = saved(tmp_path / "m", "mixtral")
    settings = json.loads((folder / "config.json").read_text()) | {"model_type": "llama", "architectures": None}
    (folder / "config.json").write_text(json.dumps(settings))
    assert any("LlamaForCausalLM of transformers adds none" in note for note in built(folder)._lockstep_notes)


def test_a_weight_that_is_not_known_is_refused(lone, tmp_path, monkeypatch):
    monkeypatch.setattr(causal_lm, "ROUTER_WEIGHTS", ())
    with pytest.raises(ModelError, match="set output_router_logits to false"):
        built(saved(tmp_path / "m", "mixtral"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    (folder / "texts.txt").write_text("".join(f"number {i} has {i * 7 % 13} legs.\n\n" for i in range(200)))
    saved(folder / "moe", "mixtral")
    config = {
        "data": {"kind": "text", "context": 24, "tokenizer": "bytes", "train": "texts.txt", "limit": 64},
        "model": {"kind": "causal_lm", "name": "moe"},
        "train": {"steps": 4, "global_batch": 8, "micro_batch": 2},
        "optim": {"lr": 0.01},
        "evaluate": {"limit": 16, "sample_tokens": 0},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    return folder


def test_equal_bits_on_any_number_of_processes(ranks, folder):
    variants = {
        "one": ["launch.processes=1"],
        "fsdp": ["launch.processes=2", "parallel.kind=fsdp"],
        "pipeline": ["launch.processes=2", "parallel.kind=pipeline"],
        "again": ["launch.processes=1", "train.recompute=true"],
    }
    digests = {
        name: trained(ranks, folder / "c.yaml", name, "observe.log_every=1", *settings)["digest"]
        for name, settings in variants.items()
    }
    assert len(set(digests.values())) == 1, digests
    lines = (folder / "runs" / "one" / "metrics.jsonl").read_text().splitlines()
    assert any("router_loss" in line for line in lines)
