"""A model with its tokenizer or image decoder: from texts or images to probabilities."""

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
"""A text; an image file, or its bytes."""
Sample = np.ndarray
"""Token ids int32 [T], or an image uint8 [C, H, W]."""
DTypeName = Literal["fp32", "fp16", "bf16"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Thread-safe."""

    facts: ExportFacts
    forward: Forward
    tokenizer: Tokenizer | None
    device: torch.device

    @property
    def labels(self) -> tuple[str, ...]:
        return self.facts.labels

    @property
    def is_parallel(self) -> bool:
        """Whether several threads predict faster than one: not on a GPU, nor where the model has a lock or, as in
        onnxruntime, its own threads."""
        return self.device.type == "cpu" and isinstance(self.forward, nn.Module)

    def encode(self, inputs: Sequence[Input]) -> list[Sample]:
        """The model's inputs; raises DataError for an invalid text or image."""
        if self.tokenizer is not None:
            texts = [_checked_text(each) for each in inputs]
            return self.tokenizer(texts) if texts else []
        shape = self.facts.image_shape
        assert shape is not None
        if any(isinstance(each, str) for each in inputs):
            raise DataError(f"{self.facts.name} takes images: give files or their contents, not texts")
        return [pixels_of(each, "the image", shape) for each in inputs]  # type: ignore[arg-type]

    def logits(self, samples: Sequence[Sample]) -> Tensor:
        """Outputs for one batch, float32 [m, classes], on the CPU."""
        column = [*samples] if self.tokenizer is not None else np.stack(samples)
        name = "input_ids" if self.tokenizer is not None else "image"
        batch = collate({name: column}, self.tokenizer.pad_id if self.tokenizer else 0, multiple=1)
        with torch.inference_mode():
            outputs = self.forward({name: tensor.to(self.device) for name, tensor in batch.items()})
        logits = logits_of(outputs)
        if logits is None or logits.ndim != 2:
            raise ModelError(
                f"{self.facts.name} gives no logits [samples, classes]: what can be predicted is which class fits; "
                "return them as one tensor, or as `logits` among several"
            )
        return logits.float().cpu()

    def probabilities(self, samples: Sequence[Sample]) -> np.ndarray:
        """Of each class, float32 [m, classes]; calibrated if the export is."""
        return (self.logits(samples) / self.facts.temperature).softmax(-1).numpy()


def predictor(
    facts: ExportFacts,
    forward: Forward,
    tokenizer: Tokenizer | None,
    *,
    device: torch.device | None = None,
    dtype: DTypeName | None = None,
) -> Predictor:
    """A predictor on a device and in a dtype, by default on the CPU as exported.

    Raises ModelError for a model that does not support them, or that takes neither texts nor images.
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
        forward = _with_lock(forward)
    made = Predictor(facts=facts, forward=forward, tokenizer=tokenizer, device=device)
    _check(made)
    return made


def _check(predictor: Predictor) -> None:
    """Predict one blank sample; raises ModelError for a model that fails, or whose outputs do not match its labels."""
    facts = predictor.facts
    if predictor.tokenizer is not None:
        samples = predictor.encode(["a"])
    else:
        samples = [np.zeros(facts.image_shape or (), dtype=np.uint8)]
    try:
        shape = tuple(predictor.logits(samples).shape)
    except LockstepError:
        raise
    except Exception as error:  # of any library, and of a user's code
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"{facts.title} cannot predict a blank sample ({type(error).__name__}: {reason})") from error
    if facts.labels and shape != (1, len(facts.labels)):
        raise ModelError(
            f"{facts.title} gives outputs {list(shape)} for one sample, where its {len(facts.labels)} labels need "
            f"[1, {len(facts.labels)}]: its labels are of another model"
        )


def _with_lock(forward: Forward) -> Forward:
    """One call at a time: a user's module may keep state on itself during a forward pass."""
    lock = threading.Lock()

    def locked(batch: Batch) -> Tensor:
        with lock:
            return forward(batch)

    return locked


def _checked_text(text: Input) -> str:
    """Raises DataError for other types, and for half of a surrogate pair, which cannot be encoded."""
    if not isinstance(text, str):
        raise DataError(f"a model of texts takes texts, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"character {error.start + 1} is half of a surrogate pair, which is no character") from None
    return text
