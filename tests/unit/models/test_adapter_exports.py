"""What exports of adapters mean to plain transformers and peft: the model as it was trained."""

import itertools
import json
import warnings

import pytest
import torch
from exporting import Case
from members import further

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, ModelError
from lockstep.inference.export import export_facts, export_reader
from lockstep.models import _adapter, _causal_lm, _transformer, causal_lm, transformer

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "llama": {**SMALL, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "roberta": SMALL,
    "electra": {**SMALL, "embedding_size": 32},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "modernbert": {**SMALL, "cls_token_id": 1, "sep_token_id": 2},
}
LABELS = ("a", "b", "c")


def saved(folder, kind, auto="AutoModelForCausalLM", **more):
    """A tiny model with random weights."""
    import transformers

    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(kind, **{"vocab_size": 60, **special, **KINDS[kind], **more})
    getattr(transformers, auto).from_config(config).save_pretrained(folder)
    return folder


def tokens(size, seed=0, length=9):
    return {"input_ids": torch.randint(3, 60, (size, length), generator=torch.Generator().manual_seed(seed))}


def trained(section, spec, module, batch=tokens):
    """A model whose trained parameters have changed."""
    model = module.build(section, spec)
    torch.manual_seed(1)
    _adapter.attach(model, section.adapter, has_new_head=section.HAS_NEW_HEAD)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return Case(model.eval(), section, spec, lambda _: None, batch)


def language_model(base, adapter):
    section = causal_lm.Config(kind="causal_lm", name=str(base), adapter={"rank": 4, **adapter})
    return trained(section, DataSpec(modality="tokens", vocabulary=60), _causal_lm)


def under_peft(folder, base, *, merges=True):
    """Logits of plain peft, and those after it has merged the adapter."""
    from peft import PeftModel

    batch = tokens(3, seed=5)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        model = PeftModel.from_pretrained(base, folder).eval()
        return [model(**batch).logits, *([model.merge_and_unload()(**batch).logits] if merges else [])]


LANGUAGE_MODELS = {
    "tied head": ("llama", True, {"targets": ["lm_head", "*.q_proj"]}),
    "tied embeddings": ("llama", True, {"train": ["embed_tokens"]}),
    "tied embeddings, by the name of the head": ("llama", True, {"train": ["lm_head"]}),
    "tied embeddings, ia3": ("llama", True, {"kind": "ia3", "train": ["embed_tokens"]}),
    "head alone": ("llama", False, {"train": ["lm_head"]}),
    "modules_to_save": ("llama", False, {"options": {"modules_to_save": ["lm_head", "norm"]}}),
    "norms": ("llama", False, {"train": ["*norm*"]}),
    "biases": ("gpt2", True, {"options": {"bias": "all"}}),
    "biases of layers with an adapter": ("gpt2", True, {"options": {"bias": "lora_only"}}),
    "a bias alone": ("gpt2", True, {"train": ["*.ln_1.bias", "*.c_attn.bias"]}),
    "dora": ("gpt2", True, {"options": {"use_dora": True}}),
    "pissa": ("gpt2", True, {"options": {"init_lora_weights": "pissa"}}),
    "bias of the matrices": ("gpt2", True, {"options": {"lora_bias": True}}),
    "loha, tied": ("llama", True, {"kind": "loha", "targets": ["*_proj", "lm_head"]}),
}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_read_elsewhere_are_as_trained(lone, tmp_path, name):
    """peft itself merges what is beside a tied head into the embeddings, too: there only its unmerged model counts."""
    from transformers import AutoModelForCausalLM

    kind, tied, adapter = LANGUAGE_MODELS[name]
    case = language_model(saved(tmp_path / "base", kind, tie_word_embeddings=tied), adapter)
    expected = case.logits(tokens(3, seed=5))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        assert (base.eval()(**tokens(3, seed=5)).logits - expected).abs().max() > 0.01
    case.export(tmp_path / "adapter", "adapter")
    case.export(tmp_path / "merged")
    theirs = under_peft(tmp_path / "adapter", base, merges="lm_head" not in adapter.get("targets", ()))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        for logits in (*theirs, merged(**tokens(3, seed=5)).logits, case.logits(tokens(3, seed=5))):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


CLASSIFIERS = ("roberta", "electra", "distilbert", "modernbert", "gpt2")
ADAPTERS = {"lora": {}, "everywhere": {"targets": "*"}, "ia3": {"kind": "ia3"}}
DAILY = [("roberta", "ia3"), ("electra", "everywhere"), ("distilbert", "lora"), ("modernbert", "ia3"), ("gpt2", "lora")]
"""Each classifier and each adapter."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [*DAILY, *further(*(each for each in itertools.product(CLASSIFIERS, ADAPTERS) if each not in DAILY))],
)
def test_classifiers_keep_their_head_under_peft(lone, tmp_path, kind, name):
    """peft fails at merging ia3 where a head has several layers."""
    adapter = ADAPTERS[name]
    from transformers import AutoModelForSequenceClassification

    saved(tmp_path / "base", kind, "AutoModel")
    section = transformer.Config(kind="transformer", name=str(tmp_path / "base"), max_length=16, adapter=adapter)

    def batch(size, seed=0, length=9):
        found = tokens(size, seed, length)
        return found | {"attention_mask": torch.ones_like(found["input_ids"]), "label": torch.zeros(size).long()}

    case = trained(section, DataSpec(modality="text", labels=LABELS), _transformer, batch)
    expected = case.logits(batch(3, seed=5))
    case.export(tmp_path / "adapter", "adapter")
    torch.manual_seed(9)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=len(LABELS))
    for logits in under_peft(tmp_path / "adapter", base, merges=adapter.get("kind") != "ia3"):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def opened(folder, base=None):
    return export_reader.forward_of(folder, export_facts.read(folder, base))


def test_the_base_of_an_adapter_is_found_and_no_other_is_taken(lone, tmp_path, monkeypatch):
    """From any folder, under peft, too; after it has moved by its new place alone; and never another for it."""
    from peft import AutoPeftModelForCausalLM

    base, elsewhere = saved(tmp_path / "far" / "base", "llama"), tmp_path / "elsewhere"
    case = language_model(base, {})
    case.export(tmp_path / "adapter", "adapter")
    saved(elsewhere / "base", "llama", initializer_range=0.3)
    monkeypatch.chdir(elsewhere)
    expected = case.logits(tokens(3, seed=5))
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()(**tokens(3, seed=5)).logits
        torch.testing.assert_close(theirs, expected)
        assert torch.equal(opened(tmp_path / "adapter")(tokens(3, seed=5)), expected)
    with pytest.raises(ModelError, match="beside other weights than those of this model"):
        opened(tmp_path / "adapter", "base")
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=f"no longer in {base}: name its folder with --base"):
        opened(tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(opened(tmp_path / "adapter", str(tmp_path / "moved"))(tokens(3, seed=5)), expected)
    (elsewhere / "base").rename(base)
    with pytest.raises(ModelError, match="has changed, or is another"):
        opened(tmp_path / "adapter")


@pytest.mark.parametrize("change", ["setting", "inner setting", "order", "repetition"])
def test_a_base_that_computes_otherwise_is_refused(lone, tmp_path, change):
    """Settings, and weights in other places, which their digest did not have; those without an effect may change."""
    from safetensors.torch import load_file, save_file

    base = saved(tmp_path / "base", "llama")
    case = language_model(base, {})
    case.export(tmp_path / "a", "adapter")
    file, settings = base / "model.safetensors", json.loads((base / "config.json").read_text())
    held, said = load_file(file), "beside other weights than those of this model"
    one, other = "model.layers.0.", "model.layers.1."
    assert {name.removeprefix(one) for name in held if one in name} == {
        n.removeprefix(other) for n in held if other in n
    }
    if change == "setting":
        settings["rms_norm_eps"], said = 0.1, "in its config.json, rms_norm_eps was 1e-06 and is 0.1. Restore it"
    elif change == "inner setting":
        settings["rope_parameters"]["rope_theta"], said = 3.0, "rope_parameters.rope_theta was 10000.0 and is 3.0"
    elif change == "order":
        swapped = {one: other, other: one}
        held = {swapped.get(name[: len(one)], name[: len(one)]) + name[len(one) :]: held[name] for name in held}
    else:
        settings["num_hidden_layers"], said = 3, "num_hidden_layers was 2 and is 3"
        held |= {name.replace(other, "model.layers.2."): held[name].clone() for name in held if other in name}
    expected = opened(tmp_path / "a")(tokens(3, seed=5))
    (base / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.5, "use_cache": False}))
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        opened(tmp_path / "a")
    (base / "config.json").write_text(
        (base / "config.json").read_text().replace("0.1", "1e-06").replace("3.0", "10000.0")
    )
    if "setting" in change:
        assert torch.equal(opened(tmp_path / "a")(tokens(3, seed=5)), expected)


def test_settings_that_peft_writes_to_are_not_the_users(lone, tmp_path):
    """peft sets pretraining_tp when it reads an adapter; settings without an effect may lie within others."""
    case = language_model(saved(tmp_path / "base", "llama", pretraining_tp=2), {})
    assert case.export(tmp_path / "a", "adapter").base_settings["pretraining_tp"] == 2
    before = {"text_config": {"eos_token_id": 1, "width": 2, "old": 3}}
    assert _adapter._changed_setting(before, {"text_config": {"eos_token_id": [1, 2], "width": 2}}) is None
    assert _adapter._changed_setting(before, {"text_config": {"width": 4}}) == "text_config.width was 2 and is 4"


def test_the_model_of_an_adapter_belongs_to_an_adapter(lone, tmp_path):
    base = saved(tmp_path / "base", "llama")
    language_model(base, {}).export(tmp_path / "merged")
    with pytest.raises(ConfigError, match="holds a whole model"):
        export_facts.read(tmp_path / "merged", str(base))


@pytest.mark.parametrize("change", ["kind", "names", "shapes"])
def test_files_of_another_adapter_are_answered(lone, tmp_path, change):
    from safetensors.torch import load_file, save_file

    case = language_model(saved(tmp_path / "base", "llama"), {"train": ["norm"]})
    case.export(tmp_path / "a", "adapter")
    weights, settings = tmp_path / "a" / _adapter.WEIGHTS, tmp_path / "a" / _adapter.CONFIG
    held = load_file(weights)
    name = next(iter(sorted(name for name in held if "lora_B" in name)))
    if change == "kind":
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"peft_type": "OFT"}))
    elif change == "names":
        save_file({key.replace(name, f"{name}s"): value for key, value in held.items()}, weights)
    else:
        save_file(held | {name: held[name][:-1].clone()}, weights)
    with pytest.raises(ModelError, match="is of another model"):
        opened(tmp_path / "a")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_adapters_in_fewer_bits_are_close(lone, tmp_path, dtype):
    case = language_model(saved(tmp_path / "base", "llama"), {"train": ["norm"]})
    facts = case.export(tmp_path / "a", "adapter", dtype=dtype)
    assert 0 < facts.agreement.largest_difference < 0.1
