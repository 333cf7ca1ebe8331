"""From texts or images to probabilities: a model with what turns its users' input into its own."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.base.contracts import Tokenizer, samples_of
from lockstep.base.errors import DataError, LockstepError, ModelError
from lockstep.base.model_contracts import Batch, Forward
from lockstep.core.modules.outputs import logits_of
from lockstep.data.collate import collate
from lockstep.data.images import pixels_of
from lockstep.inference.export.export_facts import ExportFacts

Input = str | bytes | Path
"""A text; or an image file, or its contents."""
Sample = np.ndarray
"""Token ids int32 [T], or an image uint8 [C, H, W]."""
DTypeName = Literal["fp32", "fp16", "bf16"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A model that predicts; may be called from any thread."""

    facts: ExportFacts
    forward: Forward
    tokenizer: Tokenizer | None
    device: torch.device

    @property
    def labels(self) -> tuple[str, ...]:
        return self.facts.labels

    @property
    def is_parallel(self) -> bool:
        """Whether several threads predict more than one: not where the model takes turns, or has threads of its own, as
        a session of onnxruntime does."""
        return self.device.type == "cpu" and isinstance(self.forward, nn.Module)

    def encode(self, inputs: Sequence[Input]) -> list[Sample]:
        """What the model takes of each; raises DataError for an input that is none."""
        if self.tokenizer is not None:
            texts = [text_of(each) for each in inputs]
            return self.tokenizer(texts) if texts else []
        shape = self.facts.image_shape
        assert shape is not None
        if any(isinstance(each, str) for each in inputs):
            raise DataError(f"{self.facts.name} takes images: give files or their contents, not texts")
        return [pixels_of(each, "the image", shape) for each in inputs]  # type: ignore[arg-type]

    def logits(self, samples: Sequence[Sample]) -> Tensor:
        """Outputs for a batch of them, float32 [m, classes], on the processor."""
        column = [*samples] if self.tokenizer is not None else np.stack(samples)
        name = "input_ids" if self.tokenizer is not None else "image"
        batch = collate({name: column}, self.tokenizer.pad_id if self.tokenizer else 0, multiple=1)
        with torch.inference_mode():
            outputs = self.forward({name: tensor.to(self.device) for name, tensor in batch.items()})
        found = logits_of(outputs)
        if found is None or found.ndim != 2:
            raise ModelError(
                f"{self.facts.name} gives no logits [samples, classes]: what can be predicted is which class fits; "
                "return them as one tensor, or as `logits` among several"
            )
        return found.float().cpu()

    def probabilities(self, samples: Sequence[Sample]) -> np.ndarray:
        """Of each class, float32 [m, classes]; calibrated where the export is."""
        return (self.logits(samples) / self.facts.temperature).softmax(-1).numpy()


def predictor(
    facts: ExportFacts,
    forward: Forward,
    tokenizer: Tokenizer | None,
    *,
    device: torch.device | None = None,
    dtype: DTypeName | None = None,
) -> Predictor:
    """A model where it is to run, and in what: by default on the processor, as it was exported.

    Raises ModelError for a model that cannot be used so, or that takes neither texts nor images.
    """
    device = device or torch.device("cpu")
    if isinstance(forward, nn.Module):
        forward = forward.to(device, DTYPES[dtype] if dtype else None).eval()
    elif device.type != "cpu" or dtype not in (None, facts.dtype):
        raise ModelError(
            f"an export of kind {facts.kind} runs on the processor as {facts.dtype}: leave --device and --dtype out, "
            "or export the run with export.kind=pretrained"
        )
    if tokenizer is None and facts.image_shape is None:
        raise ModelError(
            f"{facts.name} takes {samples_of(facts.modality)}: what can be predicted is images, and texts with a "
            "model's tokenizer"
        )
    if facts.model["kind"] == "user":
        forward = in_turns(forward)
    found = Predictor(facts=facts, forward=forward, tokenizer=tokenizer, device=device)
    _try(found)
    return found


def _try(predictor: Predictor) -> None:
    """Predict one blank sample: what does not fit together is better noticed now than by the first request. Raises
    ModelError."""
    facts = predictor.facts
    if predictor.tokenizer is not None:
        samples = predictor.encode(["a"])
    else:
        samples = [np.zeros(facts.image_shape or (), dtype=np.uint8)]
    try:
        shape = tuple(predictor.logits(samples).shape)
    except LockstepError:
        raise
    except Exception as error:  # as many kinds as there are libraries, and a user's own code
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"{facts.title} cannot predict a blank sample ({type(error).__name__}: {reason})") from error
    if facts.labels and shape != (1, len(facts.labels)):
        raise ModelError(
            f"{facts.title} gives outputs {list(shape)} for one sample, where its {len(facts.labels)} labels want "
            f"[1, {len(facts.labels)}]: its labels are of another model"
        )


def in_turns(forward: Forward) -> Forward:
    """One call at a time: somebody's own module may keep something on itself between two of its lines."""
    lock = threading.Lock()

    def alone(batch: Batch) -> Tensor:
        with lock:
            return forward(batch)

    return alone


def text_of(text: Input) -> str:
    """The text itself; raises DataError for what is none, and for half of a surrogate pair, which cannot be encoded."""
    if not isinstance(text, str):
        raise DataError(f"a model of texts takes texts, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"character {error.start + 1} is half of a surrogate pair, which is no character") from None
    return text
