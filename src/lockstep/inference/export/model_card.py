"""The model card: README.md of an export, in the form that the Hugging Face hub reads."""

import math
import re
from pathlib import PurePath
from typing import Any

import yaml

from lockstep.base.contracts import samples_of
from lockstep.base.templates import as_markdown, render
from lockstep.data.data_config import Origin
from lockstep.inference.export.export_facts import ExportFacts

FILE = "README.md"
HUB = "https://huggingface.co"
TASKS = {"text": "text-classification", "image": "image-classification"}
MAX_LABELS = 50
HUB_METRICS = ("accuracy", "f1")
"""Names that the hub defines."""
NEXT_LINE = "\x85"
"""A line break of YAML that PyYAML writes unescaped and reads back as a space."""


def text(facts: ExportFacts) -> str:
    """The whole card; names that come from users cannot act as Markdown, HTML or front matter."""
    recipe = yaml.safe_dump(_without_folders(facts.recipe), sort_keys=False, allow_unicode=True)
    if NEXT_LINE in recipe:
        recipe = yaml.safe_dump(_without_folders(facts.recipe), sort_keys=False)
    is_text = facts.modality == "text" and facts.model["kind"] == "transformer"
    request = '{"image": "<base64 of a PNG or JPEG>"}' if facts.image_shape else ""
    labels = [f'"{as_markdown(label)}"' for label in facts.labels[:MAX_LABELS]]
    labels += ["..."] * (len(facts.labels) > MAX_LABELS)
    return render(
        "inference/export/model_card.md.j2",
        facts=facts,
        front=_front_matter(facts),
        labels=", ".join(labels),
        samples=samples_of(facts.modality),
        is_text=is_text,
        request='{"text": "..."}' if is_text else request,
        batch="{" + ", ".join(f'"{name}": ...' for name in facts.inputs) + "}",
        data=_training_data(facts),
        recipe=recipe,
        fence="`" * (1 + max((len(run) for run in re.findall("`{3,}", recipe)), default=2)),
        plain=as_markdown,
        link=_link,
    )


def _front_matter(facts: ExportFacts) -> str:
    """YAML that the hub reads, metrics included; without what is unknown."""
    from huggingface_hub import ModelCardData

    hub_name = facts.origin.hub if facts.origin else None
    library = "transformers" if facts.model["kind"] == "transformer" else "pytorch"
    card = ModelCardData(
        library_name="onnx" if facts.kind == "onnx" else library,
        tags=["lockstep"],
        pipeline_tag=TASKS.get(facts.modality),
        model_name=facts.name,
        license=facts.license,
        language=list(facts.language) or None,
        base_model=facts.base_model,
        datasets=[hub_name] if hub_name else None,
        metrics=[name for name in HUB_METRICS if name in facts.metrics] or None,
        eval_results=_results(facts) or None,
    )
    return card.to_yaml()


def _results(facts: ExportFacts) -> list[Any]:
    """The finite metrics, each with the data set that it was measured on."""
    from huggingface_hub import EvalResult

    kind = str(facts.recipe["data"]["kind"])
    origin = facts.origin or Origin(name=kind)
    return [
        EvalResult(
            task_type=TASKS.get(facts.modality) or facts.modality,
            dataset_type=origin.hub or kind,
            dataset_name=origin.name.replace(NEXT_LINE, " "),
            dataset_config=origin.subset,
            dataset_split=origin.split,
            dataset_revision=origin.revision,
            metric_type=name.replace(NEXT_LINE, " "),
            metric_value=value,
        )
        for name, value in facts.metrics.items()
        if math.isfinite(value)
    ]


def _training_data(facts: ExportFacts) -> str:
    if facts.origin is None:
        return f"`data.kind={facts.recipe['data']['kind']}`"
    name = as_markdown(facts.origin.name)
    return _link(name, f"datasets/{facts.origin.hub}") if facts.origin.hub else name


def _link(title: str, path: str) -> str:
    return f"[{title}]({HUB}/{path})"


def _without_folders(value: Any) -> Any:
    """With every path reduced to its last component: readers of the card have other folders."""
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    if isinstance(value, str) and (PurePath(value).is_absolute() or value.startswith("~")):
        return PurePath(value).name or value
    return value
