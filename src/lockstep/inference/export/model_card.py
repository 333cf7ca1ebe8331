"""The model card: README.md of an export, in the form that the Hugging Face hub reads."""

import math
import re
from pathlib import PurePath
from typing import Any

import yaml

from lockstep.base.contracts import samples_of
from lockstep.data.data_config import Origin
from lockstep.inference.export.export_facts import ExportFacts

FILE = "README.md"
TASKS = {"text": "text-classification", "image": "image-classification"}
MOST_LABELS = 50
OF_THE_HUB = ("accuracy", "f1")
"""Names of metrics that are the hub's own."""
NEXT_LINE = "\x85"
"""A line break of YAML that PyYAML writes as it is, and reads back as a space."""


def text(facts: ExportFacts) -> str:
    """Front matter, what it is, how to use it, how good it is, how it was made."""
    recipe = yaml.safe_dump(_placeless(facts.recipe), sort_keys=False, allow_unicode=True)
    if NEXT_LINE in recipe:
        recipe = yaml.safe_dump(_placeless(facts.recipe), sort_keys=False)
    fence = "`" * (1 + max((len(run) for run in re.findall("`{3,}", recipe)), default=2))
    parts = [
        f"---\n{_front(facts)}\n---\n",
        f"# {facts.name}\n",
        f"A model of kind `{facts.model['kind']}`{_labels(facts)}.\n",
        f"## Use\n\n{_use(facts)}\n",
        f"## How good it is\n\n{_measured(facts)}\n",
        _loss(facts),
        f"## How it was made\n\nTrained {_made_from(facts)} for {facts.step:,} steps with "
        f"torch {facts.torch_version}.\nDigest of the weights in fp32: `{facts.digest}`.\n"
        "This recipe, the same data and the same version of torch give the same weights again on the same kind of\n"
        "machine:\n",
        f"{fence}yaml\n{recipe}{fence}\n",
    ]
    return "\n".join(part for part in parts if part)


def _front(facts: ExportFacts) -> str:
    """YAML, with the metrics where the hub looks for them; what is not known is left out."""
    from huggingface_hub import ModelCardData

    task, hub = TASKS.get(facts.modality), facts.origin.hub if facts.origin else None
    library = "transformers" if facts.model["kind"] == "transformer" else "pytorch"
    found = ModelCardData(
        library_name="onnx" if facts.kind == "onnx" else library,
        tags=["lockstep"],
        pipeline_tag=task,
        model_name=facts.name,
        license=facts.license,
        language=list(facts.language) or None,
        base_model=facts.base_model,
        datasets=[hub] if hub else None,
        metrics=[name for name in OF_THE_HUB if name in facts.metrics] or None,
        eval_results=_results(facts) or None,
    )
    return found.to_yaml()


def _results(facts: ExportFacts) -> list[Any]:
    """The metrics that are numbers, each with the data that it was measured on."""
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


def _made_from(facts: ExportFacts) -> str:
    """On which data, from which model."""
    start = f"from [{facts.base_model}](https://huggingface.co/{facts.base_model}) " if facts.base_model else ""
    if facts.origin is None:
        return f"{start}on `data.kind={facts.recipe['data']['kind']}`"
    name = _plain(facts.origin.name)
    place = f"[{name}](https://huggingface.co/datasets/{facts.origin.hub})" if facts.origin.hub else name
    return f"{start}on {place}"


def _plain(text: str) -> str:
    """In one line, and nothing in it is Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>|&#])", r"\\\1", " ".join(text.split()))


def _labels(facts: ExportFacts) -> str:
    if not facts.labels:
        return ""
    shown = ", ".join(f'"{_plain(label)}"' for label in facts.labels[:MOST_LABELS])
    rest = ", ..." if len(facts.labels) > MOST_LABELS else ""
    return f" that tells {len(facts.labels)} classes of {samples_of(facts.modality)} apart: {shown}{rest}"


def _use(facts: ExportFacts) -> str:
    if facts.modality == "text" and facts.model["kind"] == "transformer":
        served = _served('{"text": "..."}')
        if facts.kind != "pretrained":
            return served
        pipeline = 'pipeline("text-classification", "FOLDER_OF_THIS_FILE")("...")'
        return f"{served}\n```python\nfrom transformers import pipeline\n\n{pipeline}\n```\n"
    if facts.image_shape is not None:
        return _served('{"image": "<base64 of a PNG or JPEG>"}')
    names = ", ".join(f'"{name}": ...' for name in facts.inputs)
    call = f'forward_of("FOLDER_OF_THIS_FILE")({{{names}}})'
    imported = "from lockstep.inference.export.export_reader import forward_of"
    return f"```python\n{imported}\n\n{call}  # tensors [m, ...]\n```\n"


def _served(body: str) -> str:
    ask = f"curl -d '{body}' -H 'Content-Type: application/json' localhost:8000/predict"
    return f"```bash\nlockstep serve FOLDER_OF_THIS_FILE\n{ask}\n```\n"


def _measured(facts: ExportFacts) -> str:
    if not facts.metrics:
        return "It has not been evaluated."
    rows = "\n".join(f"| {_plain(name)} | {value:.4f} |" for name, value in facts.metrics.items())
    return f"On the test split, each sample once:\n\n| metric | value |\n|---|---|\n{rows}\n"


def _loss(facts: ExportFacts) -> str:
    found = facts.agreement
    if found is None:
        return ""
    reduced = f"The weights were reduced to {facts.dtype}, after these were measured. " if facts.dtype != "fp32" else ""
    return f"{reduced}The export (`{facts.kind}`) was {found.words(facts.dtype)}.\n"


def _placeless(value: Any) -> Any:
    """With the last part of every path alone: whoever reads a card has other folders."""
    if isinstance(value, dict):
        return {key: _placeless(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_placeless(each) for each in value]
    if isinstance(value, str) and (PurePath(value).is_absolute() or value.startswith("~")):
        return PurePath(value).name
    return value
