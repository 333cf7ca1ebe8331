"""Causal language models of transformers: pretrained and from a config alone, on any number of processes, exported."""

import json

import pytest
import torch
import torch.nn.functional as F
from causal_models import VOCABULARY, config_of, saved
from members import further
from running import lockstep, summary

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.models import _causal_lm as causal_lm

SETTINGS = ["train.steps=8", "train.global_batch=8", "train.micro_batch=2", "optim.lr=0.003", "observe.log_every=1"]
SILENT = "evaluate.sample_tokens=0"
"""Texts take longer to write than such a model to train; test_generation.py compares them."""
VARIANTS = {
    "one": ["launch.processes=1"],
    "two": ["launch.processes=2", SILENT],
    "three": ["launch.processes=3", SILENT],
    "fsdp": ["launch.processes=2", "parallel.kind=fsdp", SILENT],
    "pipeline": ["launch.processes=2", "parallel.kind=pipeline", SILENT],
}
MODELS = {
    "gpt2": ["two", "fsdp"],  # tied, with dropout
    "llama": ["three", "fsdp", "pipeline"],
    "qwen2": ["fsdp"],  # tied
    "qwen3": ["pipeline"],
}
"""Kind -> the variants that are compared with one process."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, a config file, and models with a tokenizer of the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("causal")
    rows = [f"the {name} number {i} has {i * 7 % 13} legs.\n\n" for i in range(120) for name in ("cat", "dog", "cow")]
    (folder / "texts.txt").write_text("".join(rows))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(rows, trainer)
    for kind in MODELS:
        saved(folder / kind, kind)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder / kind)
        (folder / f"{kind}.yaml").write_text(
            json.dumps(
                {
                    "data": {
                        "kind": "text",
                        "train": "texts.txt",
                        "tokenizer": str(folder / kind),
                        "context": 32,
                        "cache": "cache",
                    },
                    "model": {"kind": "causal_lm", "name": kind},
                }
            )
        )
    return folder


def train(folder, name, *settings):
    done = lockstep(folder, "train", *settings, f"run.name={name}")
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(folder, name)


@pytest.fixture(
    scope="module",
    params=["gpt2", "llama", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("qwen2", "qwen3"))],
)
def kind(folder, request):
    """A model that is trained on one process."""
    found = train(folder, request.param, f"{request.param}.yaml", *SETTINGS, *VARIANTS["one"])
    assert set(found["evaluation"]) == {"loss", "perplexity", "bits_per_byte"}
    return request.param


@pytest.mark.parametrize("kind", ["llama", *further("gpt2", "qwen2", "qwen3")], indirect=True)
def test_the_same_bits_and_metrics_on_any_cluster(folder, kind):
    expected = summary(folder, kind)
    for variant in MODELS[kind]:
        found = train(folder, f"{kind}-{variant}", f"{kind}.yaml", *SETTINGS, *VARIANTS[variant])
        for name in ("digest", "evaluation"):
            assert found[name] == expected[name], (variant, name)


def test_plain_transformers_measures_the_same_on_the_export(folder, kind, monkeypatch):
    """On the test split, with the weights of one process."""
    monkeypatch.chdir(folder)
    done = lockstep(folder, "export", f"runs/{kind}")
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "the same weights bit for bit" in output and "equal bit for bit" in output, output

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lockstep.recipe import recipe, splits

    export = folder / "runs" / kind / "export"
    network = AutoModelForCausalLM.from_pretrained(export).eval()
    vocabulary = len(AutoTokenizer.from_pretrained(export))
    assert vocabulary == VOCABULARY + (kind == "qwen2")
    assert network.config.use_cache and network.dtype == torch.float32
    test = splits.open_splits(recipe.load(folder / "runs" / kind / "recipe.yaml")).test
    rows = test.__getitems__(range(len(test)))
    tokens, target = torch.tensor(rows["input_ids"]), torch.tensor(rows["target"])
    with torch.no_grad():
        logits = network(tokens).logits
        ours = causal_lm.read_back(export, DataSpec(modality="tokens", vocabulary=vocabulary)).eval()(
            {"input_ids": tokens}
        )
    assert torch.equal(logits, ours)
    loss = float(F.cross_entropy(logits.flatten(0, 1), target.flatten()))
    assert summary(folder, kind)["evaluation"]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("other", ["fsdp", pytest.param("pipeline", marks=pytest.mark.matrix)])
def test_a_config_alone_starts_with_random_weights(folder, tmp_path, other):
    """The same on every cluster, of the data's vocabulary, and without the special tokens of another tokenizer."""
    config_of("llama", pad_token_id=7, tie_word_embeddings=False).save_pretrained(tmp_path)
    own = ["model.from_config=true", f"model.name={tmp_path}", "data.tokenizer=bytes", SILENT, *SETTINGS]
    found = {
        variant: train(folder, f"new-{other}-{variant}", "llama.yaml", *own, *VARIANTS[variant])
        for variant in ("one", other)
    }
    assert len({each["digest"] for each in found.values()}) == 1
    done = lockstep(folder, "export", f"runs/new-{other}-{other}")
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((folder / "runs" / f"new-{other}-{other}" / "export" / "config.json").read_text())
    assert config["vocab_size"] == 257
    assert [config.get(name) for name in causal_lm.SPECIAL] == [None, 256, None]  # the end of bytes


def built(name, vocabulary=VOCABULARY, **more):
    config = causal_lm.Config(kind="causal_lm", name=str(name), **more)
    return causal_lm.build(config, DataSpec(modality="tokens", vocabulary=vocabulary))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("from_config", [False, True])
def test_attention_is_chosen_as_asked_and_the_weights_are_fp32(tmp_path, attention, from_config):
    saved(tmp_path, "llama", dtype="bfloat16")
    model = built(tmp_path, attention=attention, from_config=from_config)
    assert model.network.config._attn_implementation == attention
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.network.config.eos_token_id == 0  # the tokenizer is the model's own
    held = [id(p) for block in model.blocks() for p in block.parameters()]
    assert len(held) == len(set(held)) and set(held) == {id(p) for p in model.parameters()}
    assert model.tensor_plan().counts == {"attention heads": 2, "key/value heads": 2}


def test_what_may_surprise_is_noted(tmp_path):
    from transformers import AutoModel

    torch.manual_seed(0)
    AutoModel.from_config(config_of("llama")).save_pretrained(tmp_path)
    (note,) = built(tmp_path)._lockstep_notes
    assert "the checkpoint lacks lm_head.weight (1 weights): they start at random" in note
    saved(tmp_path, "llama")
    assert built(tmp_path, vocabulary=VOCABULARY - 9)._lockstep_notes == ()  # embeddings may be padded
    (note,) = built(tmp_path, vocabulary=257)._lockstep_notes
    assert note.startswith("the model has learned 320 tokens, but the data's tokenizer has only 257")
    assert f"data.tokenizer={tmp_path} is the model's own" in note


@pytest.mark.parametrize("from_config", [False, True])
@pytest.mark.parametrize(
    "kind, message",
    [
        ("bert", "is a bert model, which is no causal language model: give one that continues texts"),
        ("vit", "is a vit model, which is no causal language model"),
        ("xlnet", "reads texts in both directions, so it is no causal language model"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(tmp_path, kind, message, from_config):
    """A BERT and an XLNet can be loaded as one, and would see the tokens that they are to predict."""
    if kind == "vit":
        from transformers import ViTConfig

        ViTConfig().save_pretrained(tmp_path)
    else:
        saved(tmp_path, kind)
    with pytest.raises(ModelError, match=message):
        built(tmp_path, from_config=from_config)


@pytest.mark.parametrize("from_config", [False, True])
def test_samples_that_are_too_long_are_refused_before_weights_are_read(tmp_path, from_config):
    config_of("gpt2").save_pretrained(tmp_path)
    config = causal_lm.Config(kind="causal_lm", name=str(tmp_path), from_config=from_config)
    with pytest.raises(ModelError, match="positions for 64 tokens, but .* has 65: set data.context=64 or less"):
        causal_lm.build(config, DataSpec(modality="tokens", vocabulary=VOCABULARY, context=65))


def test_rotary_positions_go_on_beyond_those_of_the_config(tmp_path):
    saved(tmp_path, "llama")
    config = causal_lm.Config(kind="causal_lm", name=str(tmp_path))
    model = causal_lm.build(config, DataSpec(modality="tokens", vocabulary=VOCABULARY, context=65))
    assert "goes beyond the 64 positions" in model._lockstep_notes[-1] and model.longest == 65


def test_data_without_tokens_is_refused(tmp_path):
    with pytest.raises(ModelError, match="the data has none: set data.kind=text"):
        built(saved(tmp_path, "llama"), vocabulary=None)


@pytest.mark.parametrize(
    "settings, message",
    [
        (["model.name=./none"], "there is no folder"),
        (["data.context=65", "launch.processes=2"], "positions for 64 tokens, but a sample of the data has 65: set data.context=64"),
        (["data.tokenizer=bpe", "data.vocabulary=330"], "has embeddings of 320 tokens, but the data's tokenizer has 330: set"),
        (["model.objective=regression"], "model.kind=causal_lm predicts the next token: set causal_lm or auto, not regression"),
        (["parallel.kind=pipeline", "launch.processes=2"], "no cut before block 1: network.transformer.wte.weight is used in blocks 0 and 5 alike (tied"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_one_message(folder, settings, message):
    done = lockstep(folder, "train", "gpt2.yaml", *SETTINGS, *settings, "run.name=wrong")
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert message in " ".join(output.split()), output
    assert "Traceback" not in output and output.count(message.rpartition(":")[0] or message) == 1, output
