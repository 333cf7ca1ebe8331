"""The model card: README.md of an export, in the form that the Hugging Face hub reads."""

from pathlib import PurePath
from typing import Any

import yaml

from lockstep.export.facts import Facts

FILE = "README.md"
TASKS = {"text": "text-classification", "image": "image-classification"}
MOST_LABELS = 50


def text(facts: Facts) -> str:
    """Front matter, what it is, how to use it, how good it is, how it was made."""
    parts = [
        f"---\n{_front(facts)}\n---\n",
        f"# {facts.name}\n",
        f"A model of kind `{facts.model['kind']}`{_labels(facts)}.\n",
        f"## Use\n\n{_use(facts)}\n",
        f"## How good it is\n\n{_measured(facts)}\n",
        _loss(facts),
        f"## How it was made\n\nTrained on `data.kind={facts.recipe['data']['kind']}` for {facts.step:,} steps with "
        f"torch {facts.torch_version}.\nDigest of the weights in fp32: `{facts.digest}`.\n"
        "This recipe, the same data and the same version of torch give the same weights again on the same kind of\n"
        "machine:\n",
        f"```yaml\n{yaml.safe_dump(_placeless(facts.recipe), sort_keys=False, allow_unicode=True)}```\n",
    ]
    return "\n".join(part for part in parts if part)


def _front(facts: Facts) -> str:
    """YAML, with the metrics where the hub looks for them."""
    from huggingface_hub import EvalResult, ModelCardData

    task, data = TASKS.get(facts.modality), str(facts.recipe["data"]["kind"])
    results = [
        EvalResult(
            task_type=task or facts.modality,
            dataset_type=data,
            dataset_name=data,
            dataset_split="test",
            metric_type=name,
            metric_value=value,
        )
        for name, value in facts.metrics.items()
    ]
    library = "transformers" if facts.model["kind"] == "transformer" else "pytorch"
    found = ModelCardData(
        library_name="onnx" if facts.kind == "onnx" else library,
        tags=["lockstep"],
        pipeline_tag=task,
        model_name=facts.name,
        eval_results=results or None,
    )
    return found.to_yaml()


def _labels(facts: Facts) -> str:
    if not facts.labels:
        return ""
    shown = ", ".join(" ".join(label.split()) for label in facts.labels[:MOST_LABELS])
    rest = ", ..." if len(facts.labels) > MOST_LABELS else ""
    return f" that tells {len(facts.labels)} classes of {facts.modality} apart: {shown}{rest}"


def _use(facts: Facts) -> str:
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
    return f"```python\nfrom lockstep.export.reading import forward_of\n\n{call}  # tensors [m, ...]\n```\n"


def _served(body: str) -> str:
    ask = f"curl -d '{body}' -H 'Content-Type: application/json' localhost:8000/predict"
    return f"```bash\nlockstep serve FOLDER_OF_THIS_FILE\n{ask}\n```\n"


def _measured(facts: Facts) -> str:
    if not facts.metrics:
        return "It has not been evaluated."
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in facts.metrics.items())
    return f"On the test split, each sample once:\n\n| metric | value |\n|---|---|\n{rows}\n"


def _loss(facts: Facts) -> str:
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
