"""Models of transformers that differ from the usual encoder: without a padding token, with missing weights, of images."""

import json

import numpy as np
import pytest
import torch
from class_texts import LABELS, TEXTS
from torch import nn
from training_runs import run_on_rank

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Model
from lockstep.inference import trained_model
from lockstep.inference.export.round_trip import same_weights
from lockstep.models import _transformer as transformer
from lockstep.models._causal_lm import CausalTransformer
from lockstep.models._pretrained import position_rows
from lockstep.training.trainable import unreached

SPEC = DataSpec(modality="text", labels=LABELS)


def saved_gpt2(folder, minilm):
    """A tiny GPT-2 with random weights, whose tokenizer has no padding token."""
    from transformers import AutoTokenizer, GPT2Config, GPT2Model

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.pad_token, tokenizer.eos_token = None, "[SEP]"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"bos_token_id": 101, "eos_token_id": 102}
    GPT2Model(
        GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64, **ids)
    ).save_pretrained(folder)


def test_a_model_without_a_padding_token_gets_one(ranks, minilm, tmp_path):
    saved_gpt2(tmp_path / "gpt2", minilm)
    config = transformer.Config(kind="transformer", name=str(tmp_path / "gpt2"), max_length=16)
    model, tokens = transformer.build(config, SPEC).eval(), transformer.tokenizer(config)
    assert "is padded with '[SEP]' (id 102)" in model._lockstep_notes[-1].replace("texts are", "is")
    assert model.network.config.pad_token_id == tokens.pad_id == 102
    rows = [row[:-1] for row in tokens(TEXTS)]  # the end token that BERT's tokenizer adds is not GPT-2's
    width = max(map(len, rows)) + 3
    padded = torch.tensor(np.array([np.pad(row, (0, width - len(row)), constant_values=102) for row in rows]))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        together = model({"input_ids": padded, "attention_mask": mask})
        for number, row in enumerate(rows):
            ids = torch.tensor(row.astype(np.int64))[None]
            alone = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            torch.testing.assert_close(together[number], alone[0])
    (tmp_path / "t.csv").write_text("".join(["text,label\n", *(f"{TEXTS[i % 3]} {i},{i % 3}\n" for i in range(30))]))
    found = [ranks(world, run_on_rank, recipe_in(tmp_path, f"w{world}", model="gpt2"))[0] for world in (1, 2)]
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["evaluation"] == found[1]["evaluation"]


def recipe_in(folder, name, *, model):
    return {
        "data": {
            "kind": "files",
            "train": str(folder / "t.csv"),
            "test": str(folder / "t.csv"),
            "cache": str(folder / "cache"),
        },
        "model": {"kind": "transformer", "name": str(folder / model), "max_length": 16},
        "train": {"epochs": 1, "global_batch": 8, "micro_batch": 2},
        "run": {"dir": str(folder / "runs"), "name": name},
        "observe": {"sinks": []},
    }


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS = {
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
    "deberta-v2": {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "llama": {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 64},
    "qwen2": {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 64},
}
"""Encoder and decoder; relative positions; decoders that classify by the last token."""


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("t5", "deberta-v2", "qwen2"))]
)
def test_other_kinds_have_the_same_bits_and_are_exported(ranks, minilm, tmp_path, kind):
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer) + 1, "pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **ids, **KINDS[kind])).save_pretrained(
        folder
    )
    (tmp_path / "t.csv").write_text("".join(["text,label\n", *(f"{TEXTS[i % 3]} {i},{i % 3}\n" for i in range(30))]))
    found = []
    for world, strategy in ((1, "ddp"), (2, "ddp"), (3, "fsdp")):
        recipe = recipe_in(tmp_path, f"{strategy}-{world}", model="model") | {"parallel": {"kind": strategy}}
        found.append(ranks(world, run_on_rank, recipe)[0])
    assert len({each["digest"] for each in found}) == 1
    assert all(each["evaluation"] == found[0]["evaluation"] for each in found)
    _, export = trained_model.export(tmp_path / "runs" / "ddp-1", [], None)
    plain = AutoModelForSequenceClassification.from_pretrained(export).eval()
    cut = {"truncation": True, "max_length": 16}
    with torch.no_grad():
        inputs = AutoTokenizer.from_pretrained(export)(TEXTS[0], return_tensors="pt", **cut)
        expected = plain(**inputs).logits.softmax(-1)
    predictor = trained_model.open_predictor(export)
    np.testing.assert_allclose(predictor.scores(predictor.encode([TEXTS[0]])), expected.numpy(), atol=1e-6)


def test_weights_that_a_checkpoint_lacks_are_named(tmp_path, minilm):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "lacking"
    folder.mkdir()
    for file in minilm.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    names = [name for name in weights if "layer.1.attention" in name]
    for name in names:
        del weights[name]
    weights["encoder.layer.99.output.dense.bias"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    notes = transformer.build(transformer.Config(kind="transformer", name=str(folder)), SPEC)._lockstep_notes
    assert f"({len(names)} weights): they start at random" in notes[0]
    assert not transformer.build(transformer.Config(kind="transformer", name=str(minilm)), SPEC)._lockstep_notes


@pytest.mark.parametrize("ask", [transformer.tokenizer, lambda config: transformer.build(config, SPEC)])
def test_a_model_of_images_is_refused_by_name(tmp_path, ask):
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "vit"
    with pytest.raises(ModelError, match="is a vit model, with which transformers does not classify texts"):
        ask(transformer.Config(kind="transformer", name=str(tmp_path)))


UNREACHED = {
    "big_bird": ("pooler", {"attention_type": "original_full"}),
    "esm": ("contact_head", {"mask_token_id": 103, "max_position_embeddings": 64}),
    "luke": ("_query", {"entity_vocab_size": 10, "entity_emb_size": 8}),
}
"""Parts that their classifiers have no use for."""


def body_in(folder, minilm, kind, **sizes):
    """A body of transformers with random weights, and its tokenizer."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
    AutoModel.from_config(AutoConfig.for_model(kind, **ids, **SIZES, **sizes)).save_pretrained(folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [("big_bird", {}), *(pytest.param(k, {}, marks=pytest.mark.matrix) for k in ("esm", "luke")),
     pytest.param("big_bird", {"rank": 2, "targets": "all-linear"}, marks=pytest.mark.matrix)],
)  # fmt: skip
def test_parts_that_a_classifier_has_no_use_for_are_not_trained(ranks, minilm, tmp_path, kind, adapter):
    body_in(tmp_path / "model", minilm, kind, **UNREACHED[kind][1])
    (tmp_path / "t.csv").write_text("".join(["text,label\n", *(f"{TEXTS[i % 3]} {i},{i % 3}\n" for i in range(30))]))
    found = []
    for world, strategy in ((1, "single"), (2, "ddp"), (2, "fsdp"), (2, "pipeline")):
        parallel = {"kind": strategy, **({"stages": 2} if strategy == "pipeline" else {})}
        recipe = recipe_in(tmp_path, strategy, model="model") | {"parallel": parallel}
        recipe["model"] |= {"adapter": adapter} if adapter else {}
        summary = ranks(world, run_on_rank, recipe)[0]
        if strategy == "pipeline" and kind != "big_bird":  # the part is a block of its own, which no stage enters
            assert f"leaves out network.{kind}." in summary
        else:
            found.append(summary["digest"])
    assert len({*found}) == 1


@pytest.mark.parametrize("kind", UNREACHED)
def test_a_trial_finds_them_and_leaves_nothing_behind(minilm, tmp_path, kind):
    part, sizes = UNREACHED[kind]
    body_in(tmp_path / "model", minilm, kind, **sizes)
    model = transformer.build(transformer.Config(kind="transformer", name=str(tmp_path / "model"), max_length=16), SPEC)
    tokens = torch.tensor([[101, 7, 8, 102], [101, 9, 102, 0], [101, 9, 102, 0]])
    batch = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    names = unreached(model, lambda: batch)
    assert any(part in name for name in names)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    model(batch).sum().backward()
    assert {*names} == {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


class Experts(Model):
    """BatchNorm, and two experts, of which these samples need one; beside them a layer that nothing needs."""

    def __init__(self):
        super().__init__()
        self.norm, self.experts = nn.BatchNorm1d(4), nn.ModuleList([nn.Linear(4, 2) for _ in range(2)])
        self.unused = nn.Linear(4, 4)

    def forward(self, batch):
        return {"logits": self.experts[1](self.norm(batch["x"])), "count": 1}

    def loss(self, outputs, batch):
        raise NotImplementedError

    def blocks(self):
        return [*self.children()]


def test_experts_of_other_samples_are_needed_and_statistics_are_put_back():
    model = Experts()
    assert unreached(model, lambda: {"x": torch.rand(8, 4)}) == ["unused.weight", "unused.bias"]
    assert model.norm.num_batches_tracked == 0 and torch.equal(model.norm.running_mean, torch.zeros(4))
    assert unreached(model, lambda: {"y": torch.rand(8, 4)}) == []


ODD = {
    "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    "t5": KINDS["t5"],
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
}  # fmt: skip
"""Classified by the place of the end token; whose tokenizer makes nothing of an empty text."""


def odd_in(folder, minilm, kind):
    """A classifier of transformers with random weights, and its tokenizer."""
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    if kind == "gpt2":  # without anything around a text
        plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        plain.post_processor = None
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="[SEP]", unk_token="[UNK]")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
    settings = AutoConfig.for_model(
        kind, **ids, **ODD[kind], **({} if kind == "t5" else {"max_position_embeddings": 20})
    )
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(folder)
    return tokenizer


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["bart", pytest.param("t5", marks=pytest.mark.matrix)])
def test_texts_with_several_ends_and_empty_ones_are_classified(ranks, minilm, tmp_path, kind):
    """With the same bits on every world and strategy, and as transformers classifies each of them alone."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = odd_in(tmp_path / "model", minilm, kind)
    texts = ["a [SEP] b", "", "the dog runs", "one [SEP] two [SEP] three four five six", "", "a fox"] * 5
    (tmp_path / "t.csv").write_text("".join(["text,label\n", *(f"{t},{i % 3}\n" for i, t in enumerate(texts))]))
    found = []
    for world, strategy in ((1, "ddp"), (2, "fsdp")):
        recipe = recipe_in(tmp_path, f"{strategy}-{world}", model="model") | {"parallel": {"kind": strategy}}
        found.append(ranks(world, run_on_rank, recipe)[0]["digest"])
    assert len({*found}) == 1
    model = transformer.build(transformer.Config(kind="transformer", name=str(tmp_path / "model"), max_length=16), SPEC)
    plain, model = (
        AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "model", num_labels=len(LABELS), ignore_mismatched_sizes=True
        ).eval(),
        model.eval(),
    )
    plain.load_state_dict(model.network.state_dict())
    batch = tokenizer(texts[:6], padding=True, return_tensors="pt")
    with torch.no_grad():
        together = model({name: batch[name] for name in ("input_ids", "attention_mask")})
        for row, text in enumerate(texts[:6]):
            inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            torch.testing.assert_close(plain(**inputs).logits[0], together[row])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("labels", ["class", pytest.param("tags", marks=pytest.mark.matrix)])
def test_texts_fill_all_positions_also_of_an_odd_number(ranks, minilm, tmp_path, labels):
    """20 positions; padding to a multiple of 8 would need 24. Also of texts without any token."""
    odd_in(tmp_path / "model", minilm, "gpt2")
    texts = ["one two three " * 9, "", ""] * 10
    rows = [(t, "ABC"[i % 3] if labels == "class" else " ".join("A" for _ in t.split())) for i, t in enumerate(texts)]
    (tmp_path / "t.csv").write_text("".join(["text,label\n", *(f"{t},{label}\n" for t, label in rows if label)]))
    found = []
    for world, strategy in ((1, "ddp"), (2, "fsdp")):
        recipe = recipe_in(tmp_path, f"{strategy}-{world}", model="model") | {"parallel": {"kind": strategy}}
        recipe["model"]["max_length"], recipe["data"]["labels"] = 20, labels
        recipe["train"] |= {"global_batch": 2, "micro_batch": 1, "steps": 4, "epochs": None}
        found.append(ranks(world, run_on_rank, recipe)[0]["digest"])
    assert len({*found}) == 1


LIMITS = {
    "roberta": 62,
    "bert": 64,
    "ibert": 62,
    "yoso": 64,
    "distilbert": 64,
    "gpt2": 64,
    "opt": 64,
    "llama": None,
    "xlnet": None,
}
"""Of 64 positions, or whatever these configs call them: RoBERTa leaves out those up to its padding token's."""


@pytest.mark.parametrize("kind", LIMITS)
def test_how_many_tokens_a_model_has_learned_positions_for(kind):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"gpt2": ODD["gpt2"], "xlnet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}}.get(kind, SIZES)
    known = {} if kind == "xlnet" else {"max_position_embeddings": 64}
    settings = AutoConfig.for_model(kind, vocab_size=99, pad_token_id=1, **sizes, **known)
    assert position_rows(network := AutoModelForSequenceClassification.from_config(settings).eval()) == LIMITS[kind]
    for length in range(61, 67):
        tokens = torch.full((1, length), 7)
        try:
            network(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        except Exception:
            assert LIMITS[kind] is not None and length > LIMITS[kind]
        else:
            assert LIMITS[kind] is None or length <= LIMITS[kind]


def test_landmarks_are_refused_where_texts_are_padded(minilm, tmp_path):
    body_in(tmp_path / "model", minilm, "nystromformer", num_landmarks=4, segment_means_seq_len=16)
    config = transformer.Config(kind="transformer", name=str(tmp_path / "model"), max_length=16)
    with pytest.raises(ModelError, match="set num_landmarks=16 in its config.json"):
        transformer.build(config, SPEC)
    settings = json.loads((tmp_path / "model" / "config.json").read_text()) | {"num_landmarks": 16}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    transformer.build(config, SPEC)


def test_a_tokenizer_that_does_not_end_texts_is_refused_where_they_are_classified_by_their_end(minilm, tmp_path):
    odd_in(tmp_path / "bart", minilm, "bart")
    odd_in(tmp_path / "gpt2", minilm, "gpt2")
    for file in (tmp_path / "gpt2").glob("tokenizer*"):
        (tmp_path / "bart" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="which its tokenizer does not add"):
        transformer.build(transformer.Config(kind="transformer", name=str(tmp_path / "bart"), max_length=16), SPEC)


def test_an_export_is_read_back_whose_class_computes_a_buffer_in_bf16(tmp_path):
    from transformers import AutoModelForCausalLM, RecurrentGemmaConfig

    sizes = {**SIZES, "attention_window_size": 8, "block_types": ("recurrent", "attention"), "head_dim": 8}
    plain = AutoModelForCausalLM.from_config(RecurrentGemmaConfig(vocab_size=99, num_key_value_heads=1, **sizes))
    spec = DataSpec(modality="tokens", vocabulary=99)
    model = CausalTransformer(plain.float(), spec)
    model.save(tmp_path)
    again = CausalTransformer.read_back(tmp_path, spec)
    assert again.network.model.normalizer.dtype == torch.bfloat16
    assert same_weights(model, again)
    again.network.model.normalizer += 1
    with pytest.raises(ModelError, match="normalizer"):
        same_weights(model, again)
