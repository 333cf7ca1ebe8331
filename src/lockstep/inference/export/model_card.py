"""The model card: README.md of an export, in the form that the Hugging Face hub reads."""

import math
import re
from pathlib import PurePath
from typing import Any

import yaml

from lockstep.base import plugins
from lockstep.base.contracts import samples_of
from lockstep.base.json_values import with_texts
from lockstep.base.templates import as_markdown, render
from lockstep.data.data_config import Origin
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.models.objectives._choice import name_of

FILE = "README.md"
HUB = "https://huggingface.co"
TASKS = {
    "text": "text-classification",
    "image": "image-classification",
    "audio": "audio-classification",
    "tokens": "text-generation",
}
PIPELINES = {
    "transformer": {
        "classification": "text-classification",
        "regression": "text-classification",
        "multilabel": "text-classification",
        "token_classification": "token-classification",
    },
    "image_classifier": {"classification": "image-classification"},
    "audio_classifier": {"classification": "audio-classification"},
    "causal_lm": {"causal_lm": "text-generation"},
}
"""Kind of a model that transformers loads -> objective -> its pipeline that predicts the same."""
ASKED = '[{"role": "user", "content": "..."}]'
MAX_LABELS = 50
HUB_METRICS = ("accuracy", "f1")
"""Names that the hub defines."""
NEXT_LINE = "\x85"
"""A line break of YAML that PyYAML writes unescaped and reads back as a space."""


def text(facts: ExportFacts) -> str:
    """Return the whole card; names that come from users cannot act as Markdown, HTML or front matter."""
    sections = with_texts(facts.recipe, _without_folder)
    recipe = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
    if NEXT_LINE in recipe:
        recipe = yaml.safe_dump(sections, sort_keys=False)
    return render(
        "inference/export/model_card.md.j2",
        facts=facts,
        front=_front_matter(facts),
        purpose=purpose_of(facts),
        pipeline=PIPELINES.get(facts.model["kind"], {}).get(name_of(facts.spec)),
        options=", top_k=None" if name_of(facts.spec) == "multilabel" else "",
        asked=ASKED if _has_chats(facts) else '"..."',
        route="generate" if facts.learned.GENERATES else "predict",
        request=_request(facts),
        batch="{" + ", ".join(f'"{name}": ...' for name in facts.inputs) + "}",
        data=_training_data(facts),
        recipe=recipe,
        fence="`" * (1 + max((len(run) for run in re.findall("`{3,}", recipe)), default=2)),
        plain=as_markdown,
        link=_link,
    )


def _request(facts: ExportFacts) -> str:
    """Return a request to the server, as JSON; empty where it cannot serve the model."""
    if facts.learned.GENERATES:
        return f'{{"messages": {ASKED}}}' if _has_chats(facts) else '{"prompt": "..."}'
    if facts.modality == "text" and facts.model["kind"] == "transformer":
        return '{"text": "..."}'
    if facts.modality == "audio" and "seconds" in facts.recipe["data"]:
        return '{"audio": "<base64 of a WAV, FLAC, OGG or MP3>"}'
    return '{"image": "<base64 of a PNG or JPEG>"}' if facts.image_shape else ""


def _has_chats(facts: ExportFacts) -> bool:
    kind = facts.recipe.get("data", {}).get("kind")
    return facts.learned.GENERATES and kind is not None and plugins.find("data.sources", kind).Config.CHATS


def purpose_of(facts: ExportFacts) -> str:
    """Return the purpose of the model, as "that ..."; empty where it is unknown."""
    names = facts.labels or facts.numbers
    shown = [f'"{as_markdown(name)}"' for name in names[:MAX_LABELS]] + ["..."] * (len(names) > MAX_LABELS)
    return facts.learned.PURPOSE.format(count=len(names), names=", ".join(shown), samples=samples_of(facts.modality))


def _task(facts: ExportFacts) -> str | None:
    """Return the hub's name of the task; None where it has none."""
    return facts.learned.TASK or TASKS.get(facts.modality)


def _front_matter(facts: ExportFacts) -> str:
    """Return YAML that the hub reads, metrics included; without unknown values."""
    from huggingface_hub import ModelCardData

    hub_name = facts.origin.hub if facts.origin else None
    library = "transformers" if facts.model["kind"] in PIPELINES else "pytorch"
    card = ModelCardData(
        library_name={"onnx": "onnx", "adapter": "peft"}.get(facts.kind, library),
        tags=["lockstep"],
        pipeline_tag=_task(facts),
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
    """Return the finite metrics, each with the data set that it was measured on."""
    from huggingface_hub import EvalResult

    kind = str(facts.recipe["data"]["kind"])
    origin = facts.origin or Origin(name=kind)
    return [
        EvalResult(
            task_type=_task(facts) or facts.modality,
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


def _without_folder(text: str) -> str:
    """Reduce a path to its last component: readers of the card have other folders."""
    is_path = PurePath(text).is_absolute() or text.startswith("~")
    return PurePath(text).name or text if is_path else text
