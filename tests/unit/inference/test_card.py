"""The model card: what the hub reads of it is what is known, and nothing that is not."""

import re
from pathlib import PurePath

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.base import plugins
from lockstep.base.errors import ConfigError
from lockstep.data.data_config import Origin
from lockstep.inference import trained_model
from lockstep.inference.export import model_card
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.recipe.recipe import of_sections, starter

PLAIN = {
    "name": "a", "kind": "pretrained", "model": {"kind": "cnn"}, "modality": "image", "labels": ("0", "1"), "step": 1,
    "digest": "0" * 64, "metrics": {"accuracy": 0.5, "loss": 1.25}, "recipe": {"data": {"kind": "digits"}},
}  # fmt: skip


def facts(**more):
    return ExportFacts(**{**PLAIN, **more})


def about(**sections):
    """What a recipe tells about itself."""
    return trained_model._about(of_sections(sections))


def front(text):
    """As the hub's own library reads it."""
    found = ModelCard(text, ignore_metadata_errors=False)
    assert found.content.count("\n---\n") >= 1
    return found.data


def test_all_that_is_known_of_a_text_model():
    recipe = {"data": {"kind": "ag_news"}, "model": {"kind": "transformer"}, "export": {"license": "apache-2.0"}}
    text = model_card.text(facts(model={"kind": "transformer", "name": "x"}, modality="text", **about(**recipe)))
    found = front(text)
    assert (found.license, found.language, found.base_model) == ("apache-2.0", ["en"], "distilbert-base-uncased")
    assert (found.datasets, found.library_name, found.metrics) == (["fancyzhx/ag_news"], "transformers", ["accuracy"])
    assert (found.pipeline_tag, found.tags) == ("text-classification", ["lockstep"])
    assert {(r.dataset_name, r.dataset_type, r.dataset_split) for r in found.eval_results} == {
        ("AG News", "fancyzhx/ag_news", "test")
    }
    assert {r.metric_type: r.metric_value for r in found.eval_results} == PLAIN["metrics"]
    assert "from [distilbert-base-uncased](https://huggingface.co/distilbert-base-uncased)" in text
    assert "on [AG News](https://huggingface.co/datasets/fancyzhx/ag_news)" in text


def test_nothing_is_invented(tmp_path, minilm):
    """A model of one's own, on a file of one's own; a pretrained one from a folder, which is nobody's name."""
    mine = about(
        data={"kind": "files", "train": str(tmp_path / "reviews.csv")},
        model={"kind": "transformer", "name": str(minilm)},
    )
    assert (mine["license"], mine["language"], mine["base_model"]) == (None, (), None)
    text = model_card.text(facts(modality="text", model={"kind": "transformer"}, **mine))
    head = yaml.safe_load(text.split("---\n")[1])
    assert not {"license", "language", "base_model", "datasets"} & set(head)
    assert head["model-index"][0]["results"][0]["dataset"]["name"] == "reviews"
    assert "None" not in text
    named = about(
        data={"kind": "hub", "name": "a/b", "subset": "c", "revision": "d", "text_column": "t", "test_split": "validation"},
        model={"kind": "transformer"},
        export={"license": "mit", "language": ["de", "pt-BR"], "base_model": "me/mine"},
    )  # fmt: skip
    found = front(model_card.text(facts(modality="text", **named)))
    assert (found.license, found.language, found.base_model) == ("mit", ["de", "pt-BR"], "me/mine")
    (result, *_) = found.eval_results
    assert (result.dataset_type, result.dataset_config, result.dataset_revision) == ("a/b", "c", "d")
    assert result.dataset_split == "validation"


@pytest.mark.parametrize("kind", [kind for kind in plugins.names("data.sources") if kind != "user"])
def test_every_source_says_what_it_is(kind):
    found = trained_model._about(starter(kind))["origin"]
    assert found.name and found.name != kind


@pytest.mark.parametrize(
    "wrong", [{"license": "Apache 2.0"}, {"license": "a\nb: c"}, {"language": ["English"]}, {"base_model": "a/b/c"}, {"base_model": "~/x"}]
)  # fmt: skip
def test_what_the_hub_would_refuse_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"export.{next(iter(wrong))}"):
        of_sections({"export": wrong})


ODD = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    ["---\nlicense: evil", "```\n# Evil", "<script>alert(1)</script>", "a: [", "'", '"', "\x1b[31m", "\u2028", "| a |", "*a* [b](c)", "&lt;"]
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@example("a", "b", "/", {})
@example("a", "b", "/home/me/models", {})
@given(ODD, ODD, ODD, st.dictionaries(ODD.filter(str.strip), st.floats(), max_size=3))
def test_whatever_names_hold_the_card_says_the_same(label, name, value, metrics):
    """Front matter that reads back, and one line without Markdown or HTML for each name."""
    origin = Origin(name=name or "x", subset=value or None)
    recipe = {"data": {"kind": "user", "options": {"note": value}}}
    text = model_card.text(facts(labels=(label, "1"), origin=origin, recipe=recipe, metrics=metrics))
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()
    found = yaml.safe_load(head)
    assert not {"license", "datasets", "base_model", "language"} & set(found)
    for result in found.get("model-index", [{"results": []}])[0]["results"]:
        assert result["dataset"]["name"] == (name or "x").replace("\x85", " ")
    shown = body.partition('apart: "')[2].partition('", "1".\n')[0]
    assert re.sub(r"\\([\\`*_\[\]<>|&#])", r"\1", shown) == " ".join(label.split())
    assert not re.search(r"(?<!\\)<", body.partition("\n```")[0])
    fence, inside = re.search(r"\n(`{3,})yaml\n(.*?)\1\n$", body, re.DOTALL).groups()
    if value.startswith(("/", "~")):  # the readers have other folders
        recipe["data"]["options"]["note"] = PurePath(value).name or value
    assert yaml.safe_load(inside) == recipe and fence not in inside
