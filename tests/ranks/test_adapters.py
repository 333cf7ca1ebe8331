"""LoRA and other adapters of peft: on any number of processes, exported alone and merged, read by plain peft."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from causal_models import saved
from running import lockstep, summary
from training_runs import trained

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError
from lockstep.base.world import World
from lockstep.inference import trained_model
from lockstep.inference.generation.sampling import Sampling
from lockstep.models import _adapter, _causal_lm, causal_lm
from lockstep.recipe import build
from lockstep.recipe import recipe as recipes

SIZES = {"hidden_size": 128, "intermediate_size": 344, "head_dim": 64}
ADAPTER = {"rank": 2, "dropout": 0.1, "targets": ["*.q_proj", "*.v_proj"]}
CONFIG = {
    "data": {
        "kind": "text",
        "context": 24,
        "limit": 64,
        "tokenizer": "bytes",
        "train": "texts.txt",
    },
    "model": {"kind": "causal_lm", "name": "llama", "adapter": ADAPTER},
    "train": {"steps": 6, "global_batch": 8, "micro_batch": 2},
    "optim": {"lr": 0.01},
    "evaluate": {"limit": 16, "sample_tokens": 0},
    "launch": {"processes": 1},
}
VARIANTS = {
    "one": ["launch.processes=1"],
    "two": ["launch.processes=2"],
    "three": ["launch.processes=3"],
    "fsdp": ["launch.processes=2", "parallel.kind=fsdp"],
    "pipeline": ["launch.processes=2", "parallel.kind=pipeline"],
}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    """A tiny Llama, and its runs with an adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "texts.txt").write_text("".join(f"number {i} has {i * 7 % 13} legs.\n\n" for i in range(200)))
    saved(folder / "llama", "llama", **SIZES)
    (folder / "c.yaml").write_text(json.dumps(CONFIG))
    for name, settings in VARIANTS.items():
        trained(ranks, folder / "c.yaml", name, *settings)
    run(folder, "export", "runs/one", "--to", "merged")
    run(folder, "export", "runs/one", "--to", "adapter", "export.kind=adapter")
    run(folder, "export", "runs/one", "--to", "runs/one/adapter", "export.kind=adapter")
    return folder


def run(folder, *arguments, code=0):
    done = lockstep(folder, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_equal_bits_on_any_number_of_processes(folder):
    digests = {name: summary(folder, name)["digest"] for name in VARIANTS}
    assert len(set(digests.values())) == 1, digests


def test_only_the_adapter_is_trained(folder, monkeypatch):
    monkeypatch.chdir(folder)
    model = trained_model.open_predictor(folder / "runs" / "one").forward
    fresh = build.build_model(recipes.load(folder / "runs" / "one" / "recipe.yaml"), trained_spec(folder))
    before, after = fresh.state_dict(), model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 8 and all(".lora_" in name for name in changed)


def trained_spec(folder):
    return trained_model.open_predictor(folder / "merged").facts.spec


def test_the_adapter_alone_is_small(folder):
    sizes = {
        name: sum(path.stat().st_size for path in (folder / name).glob("*.safetensors"))
        for name in ("merged", "adapter")
    }
    assert sizes["adapter"] < 0.02 * sizes["merged"]
    assert {path.name for path in (folder / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}


def test_merged_alone_and_unmerged_give_the_same(folder, monkeypatch):
    monkeypatch.chdir(folder)
    batch = {"input_ids": torch.arange(24).view(2, 12) % 250}
    run_, merged, alone = (
        trained_model.open_predictor(folder / path).forward(batch) for path in ("runs/one", "merged", "adapter")
    )
    assert torch.equal(run_, alone)
    torch.testing.assert_close(run_, merged, rtol=1e-4, atol=1e-5)
    pretrained = build.build_model(
        recipes.of_sections(CONFIG | {"model": {"kind": "causal_lm", "name": "llama"}}), trained_spec(folder)
    )
    assert (pretrained.eval()(batch) - run_).abs().max() > 1e-3
    greedy = Sampling(max_tokens=12, temperature=0)
    texts = [
        trained_model.open_predictor(folder / path).complete(["number 3"], greedy)[0].text
        for path in ("merged", "adapter")
    ]
    assert texts[0] == texts[1] != ""


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_plain_peft_and_transformers_read_them(folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    batch = torch.arange(24).view(2, 12) % 250
    base = AutoModelForCausalLM.from_pretrained(folder / "llama")
    theirs = PeftModel.from_pretrained(base, folder / "adapter").eval()(input_ids=batch).logits
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()(input_ids=batch).logits
    ours = trained_model.open_predictor(folder / "runs" / "one").forward({"input_ids": batch})
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged, ours, rtol=1e-4, atol=1e-5)


def test_an_adapter_answers_with_its_moved_base(folder):
    (folder / "llama").rename(folder / "moved")
    try:
        said = run(folder, "evaluate", "adapter", "--to", "measured", code=2)
        assert f"no longer in {folder / 'llama'}: name its folder with --base" in said
        run(folder, "evaluate", "adapter", "--to", "measured", "--base", "moved")
        (folder / "prompts.txt").write_text("number 3\n")
        asked = ("predict", "adapter", "prompts.txt", "--out", "answers.jsonl", "--processes", "1", "--max-tokens", "3")
        run(folder, *asked, "--base", "moved")
    finally:
        (folder / "moved").rename(folder / "llama")
    run(folder, "evaluate", "merged", "--to", "expected")
    alone, merged = (
        json.loads((folder / name / "evaluation.json").read_text())["metrics"]["loss"]
        for name in ("measured", "expected")
    )
    assert alone == pytest.approx(merged, abs=1e-5)
    assert json.loads((folder / "answers.jsonl").read_text())["completion"]


def test_a_resume_and_a_warm_start(ranks, folder):
    """The run goes on with the same bits; a second task starts with the first one's adapter."""
    for name, steps in (("half", 3), ("half", 6), ("whole", 6)):
        trained(ranks, folder / "c.yaml", name, f"train.steps={steps}", "schedule.shape=constant")
    assert summary(folder, "half")["digest"] == summary(folder, "whole")["digest"]
    said = run(folder, "train", "c.yaml", "run.name=next", "model.init=runs/one", "train.steps=1")
    assert re.search(r"model.init: (\d+) of the model's \1 weights", said)
    said = run(folder, "train", "c.yaml", "run.name=other", "model.init=merged", "train.steps=1")
    assert (
        "not in it, so they start as without it: network.model.layers.0.self_attn.q_proj.lora_A.default.weight" in said
    )
    said = run(folder, "train", "c.yaml", "run.name=exported", "model.init=runs/one/adapter", "train.steps=1")
    assert re.search(r"model.init: (\d+) of the model's \d+ weights", said)[1] == "8", said
    assert "start as without it" not in said and f"it is an adapter of {folder / 'llama'}" in " ".join(said.split())
    shutil.copytree(folder / "adapter", folder / "damaged")
    (folder / "damaged" / "adapter_config.json").write_text("[1")
    said = run(folder, "train", "c.yaml", "run.name=damaged", "model.init=damaged", "train.steps=1")
    assert "it is an adapter of an unknown model" in " ".join(said.split())
    said = run(folder, "train", "c.yaml", "run.name=bare", "model.init=adapter", "model.adapter=null", code=2)
    assert "set model.adapter as it was for this adapter" in " ".join(said.split())
    digests = {summary(folder, name)["digest"] for name in ("next", "exported")}
    assert len(digests) == 1
    said = run(folder, "train", "c.yaml", "run.name=alone", "model.name=adapter", code=2)
    assert "adapter is an adapter without its model, which adapter_config.json names: give that model" in said


@pytest.mark.parametrize(
    "adapter", [{"kind": "ia3"}, {"kind": "loha"}, {"kind": "lokr"}, {"options": {"use_dora": True}}]
)
def test_other_methods(ranks, folder, adapter, monkeypatch):
    """A step of each on one and on two processes."""
    from optimizer_runs import train_on_rank

    config = CONFIG | {"model": {"kind": "causal_lm", "name": str(folder / "llama"), "adapter": adapter}}
    config["train"] = config["train"] | {"steps": 2}
    config["data"] = config["data"] | {"train": str(folder / "texts.txt")}
    ((first, last),) = ranks(1, train_on_rank, config)
    assert first != last
    assert ranks(2, train_on_rank, config) == [(first, last)] * 2


def test_a_classifier_trains_its_head_too(lone, small_encoder):
    folder = small_encoder
    config = {
        "data": {"kind": "files", "train": str(folder / "t.csv")},
        "model": {"kind": "transformer", "name": str(folder), "adapter": {"rank": 2}, "max_length": 16},
    }
    parts = build.assemble(recipes.of_sections(config), World(), torch.device("cpu"))
    changing = {name for name, p in parts.model.named_parameters() if p.requires_grad}
    heads = {name for name in changing if "lora_" not in name}
    assert heads == {
        f"network.{part}.{what}" for part in ("pre_classifier", "classifier") for what in ("weight", "bias")
    }
    assert any("ffn.lin1.lora_A" in name for name in changing)


@pytest.fixture(scope="module")
def small_encoder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    sizes = {"vocab_size": len(words), "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
    DistilBertModel(DistilBertConfig(**sizes, pad_token_id=0)).save_pretrained(folder)
    picks = np.random.default_rng(0).choice(words[2:], (32, 4))
    (folder / "t.csv").write_text("text,label\n" + "".join(f"{' '.join(row)},{i % 2}\n" for i, row in enumerate(picks)))
    return folder


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"adapter": {"targets": "*.q_prj"}}, "model.adapter.targets: '..q_prj' matches no"),
        ({"adapter": {"options": {"rnk": 3}}}, "model.adapter.options: .*rnk"),
        ({"adapter": {"train": "head"}}, "model.adapter.train: 'head' matches no"),
        ({"adapter": {"kind": "ia3", "alpha": 3}}, "ia3 has no alpha"),
        ({"adapter": {"kind": "lra"}}, "model.adapter.kind"),
    ],
)
def test_mistakes_are_answered_with_the_repair(lone, folder, settings, says, monkeypatch):
    monkeypatch.chdir(folder)
    config = CONFIG | {"model": {"kind": "causal_lm", "name": "llama", **settings}}
    with pytest.raises(ConfigError, match=re.compile(says, re.DOTALL)):
        build.assemble(recipes.of_sections(config), World(), torch.device("cpu"))


@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj"], "all-linear", r".*\.layers\.0\..*(q|v)_proj", ["1.mlp.up_proj"], ["lm_head"]]
)
def test_targets_mean_what_they_mean_to_peft(lone, folder, targets):
    import peft
    from transformers import AutoModelForCausalLM

    config = causal_lm.Config(kind="causal_lm", name=str(folder / "llama"), adapter={"targets": targets})
    ours = _causal_lm.build(config, DataSpec(modality="tokens", vocabulary=257)).network
    _adapter.attach(ours, config.adapter, has_new_head=False)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "llama")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"), theirs)
    adapted = [{name for name, _ in each.named_modules() if name.endswith(".lora_A")} for each in (ours, theirs)]
    assert adapted[0] == adapted[1] != set()


def test_an_initialisation_that_transposes_wrongly_is_refused(lone, tmp_path):
    saved(tmp_path / "gpt2", "gpt2")
    options = {"options": {"init_lora_weights": "olora"}}
    config = causal_lm.Config(kind="causal_lm", name=str(tmp_path / "gpt2"), adapter=options)
    model = _causal_lm.build(config, DataSpec(modality="tokens", vocabulary=257))
    with pytest.raises(ConfigError, match="olora does not fit the transposed layers"):
        _adapter.attach(model, config.adapter, has_new_head=False)


def test_what_cannot_be_is_refused(folder):
    said = run(folder, "train", "c.yaml", "parallel.kind=tensor", code=2)
    assert "layers with an adapter are not split as parallel.kind=tensor splits layers" in said
    said = run(folder, "train", "c.yaml", "model.adapter=null", "export.kind=adapter", code=2)
    assert "the model has none: set model.adapter={rank: 8}" in said
