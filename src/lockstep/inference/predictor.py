"""A model with its tokenizer or file reader: from texts, images or sounds to predictions."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lockstep.base.contracts import Tokenizer, samples_of
from lockstep.base.errors import DataError, LockstepError, ModelError
from lockstep.base.model_contracts import Batch, Forward
from lockstep.core.numerics.word_tokens import ids_of
from lockstep.data.collate import collate
from lockstep.data.preparation import Preparation
from lockstep.data.processors import FileReader, Processor, reader_of
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats._weights import TORCH_DTYPES
from lockstep.models._documents import are_close
from lockstep.models.objectives._objective import PredictingObjective

Input = str | bytes | Path | Image.Image
"""A text; an image or sound file, or its bytes; an image of Pillow."""
Sample = np.ndarray
"""Token ids int32 [T], marked ones for words; an image uint8 [C, H, W]; features of a sound, float32 [T] or [T, B]."""
TRIED = "one text, alone and together"
DTypeName = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictor:
    """A model with its tokenizer or file reader. Thread-safe."""

    facts: ExportFacts
    forward: Forward
    tokenizer: Tokenizer | None
    reader: FileReader | None
    """Reader that turns a file into the model's input; None for a model of texts."""
    device: torch.device
    objective: PredictingObjective
    preparation: Preparation | None = None
    bears_padding: bool = True
    """Whether texts of different lengths can be read together."""

    @property
    def takes(self) -> str:
        """The input: text, image or audio."""
        return self.reader.modality if self.reader is not None else "text"

    @property
    def is_parallel(self) -> bool:
        """Whether several threads predict faster than one: not on a GPU, with a lock, or own threads (onnxruntime)."""
        return self.device.type == "cpu" and isinstance(self.forward, nn.Module)

    def encode(self, inputs: Sequence[Input]) -> list[Sample]:
        """Return the model's inputs. Raises DataError for an invalid text, image or sound."""
        if self.tokenizer is not None:
            texts = [valid_text(each) for each in inputs]
            texts = self.preparation.texts(texts) if self.preparation else texts
            return self.tokenizer(texts) if texts else []
        assert self.reader is not None
        if any(isinstance(each, str) for each in inputs):
            takes = samples_of(self.reader.modality)
            raise DataError(f"{self.facts.name} takes {takes}: give files or their contents, not texts")
        return [
            self.reader(each, str(each) if isinstance(each, Path) else f"the {self.reader.modality}") for each in inputs
        ]

    def outputs(self, samples: Sequence[Sample]) -> Tensor:
        """Return outputs for one batch, float32 [m, K] or [m, T, K], on the CPU. Raises ModelError for other shapes."""
        column = "input_ids" if self.reader is None else self.reader.column
        if self.reader is None:
            samples = [ids_of(sample) for sample in samples]
        if self.bears_padding and (self.reader is None or self.reader.spec.get("masks")):
            return self._batch_outputs(column, samples)
        rows: dict[int, list[int]] = {}
        for row, sample in enumerate(samples):
            rows.setdefault(len(sample), []).append(row)
        found: dict[int, Tensor] = {}
        for group in rows.values():
            found |= zip(group, self._batch_outputs(column, [samples[row] for row in group]), strict=True)
        return pad_sequence([found[row] for row in range(len(samples))], batch_first=True)

    def _batch_outputs(self, column: str, samples: Sequence[Sample]) -> Tensor:
        """Return outputs for samples that are padded to one length; without a mask, the padding changes them."""
        spec = replace(self.facts.spec, **self.reader.spec) if self.reader else None
        pad_id = self.tokenizer.pad_id if self.tokenizer else 0
        batch = collate({column: list(samples)}, pad_id, multiple=1, spec=spec)
        with torch.inference_mode():
            outputs = self.forward({name: tensor.to(self.device) for name, tensor in batch.items()})
        return self.objective.raw(outputs, self.facts.spec)

    def scores(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return probabilities or numbers, float32 [m, K], or [m] arrays [W, K]; calibrated if the export is."""
        scores = self.objective.scores(self.outputs(samples), self.facts.temperature).numpy()
        return self.objective.of_samples(scores, samples)

    def answer(self, scores: np.ndarray, asked: Input) -> dict[str, Any]:
        """Return the prediction for the scores of a sample, as JSON; `asked` is the text, image or sound."""
        text = asked if isinstance(asked, str) and self.tokenizer is not None else ""
        return self.objective.answer(scores, self.facts.spec, text)


def predictor(
    facts: ExportFacts,
    forward: Forward,
    tokenizer: Tokenizer | None,
    *,
    processor: Processor | None = None,
    device: torch.device,
) -> Predictor:
    """Build a predictor of a model on a device. Raises ModelError for a model that takes neither texts nor files."""
    reader = reader_of(facts.spec, processor)
    if tokenizer is None and reader is None:
        raise ModelError(
            f"{facts.name} takes {samples_of(facts.modality)}: what can be predicted is images, sounds of "
            "data.kind=audio, and texts with a model's tokenizer"
        )
    if not isinstance(facts.learned, PredictingObjective):
        raise ModelError(
            f"{facts.title} has neither labels nor numbers to predict: what can be predicted is which labels fit, and "
            "numbers (model.objective)"
        )
    if facts.model["kind"] == "user":
        forward = _with_lock(forward)
    made = Predictor(
        facts=facts,
        forward=forward,
        tokenizer=tokenizer,
        reader=reader,
        device=device,
        objective=facts.learned,
        preparation=processor if isinstance(processor, Preparation) else None,
    )
    _check(made)
    return made if reader is not None or _bears_padding(made) else replace(made, bears_padding=False)


def placed(
    facts: ExportFacts, forward: Forward, *, device: torch.device | None, dtype: DTypeName | None
) -> tuple[Forward, torch.device]:
    """Move a model to a device and a dtype, by default to a GPU, if there is one, as exported. Raises ModelError for a
    graph that does not support them."""
    device = device or torch.device("cuda" if isinstance(forward, nn.Module) and torch.cuda.is_available() else "cpu")
    if isinstance(forward, nn.Module):
        return forward.to(device, TORCH_DTYPES[dtype] if dtype else None).eval(), device
    if device.type != "cpu" or dtype not in (None, facts.dtype):
        raise ModelError(
            f"an export of kind {facts.kind} runs on the processor as {facts.dtype}: leave --device and --dtype out, "
            "or export the run with export.kind=pretrained"
        )
    return forward, device


@contextmanager
def use_errors(what: str) -> Iterator[None]:
    """Turn an error of any library, or of a user's code, into a ModelError that says what could not be done."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"{what} ({type(error).__name__}: {reason})") from error


def _check(predictor: Predictor) -> None:
    """Predict one blank sample; raises ModelError for a model that fails, or whose outputs do not match its targets."""
    samples = [predictor.reader.blank()] if predictor.reader is not None else predictor.encode(["a"])
    with use_errors(f"{predictor.facts.title} cannot predict a blank sample"):
        try:
            predictor.scores(samples)
        except LockstepError as error:
            raise ModelError(f"{predictor.facts.title} cannot be used: {error}") from error


def _bears_padding(predictor: Predictor) -> bool:
    """Return whether a text has the same outputs alone and beside a longer one; True where rounding would hide it."""
    forward = predictor.forward
    if not isinstance(forward, nn.Module) or any(each.dtype != torch.float32 for each in forward.parameters()):
        return True
    try:
        samples = predictor.encode([TRIED, " ".join([TRIED] * 4)])
    except DataError:  # of the user's preparation
        return True
    (alone,), (together, _) = predictor.outputs(samples[:1]), predictor.outputs(samples)
    return are_close(together[: len(alone)], alone)


def _with_lock(forward: Forward) -> Forward:
    """Allow one call at a time: a user's module may keep state on itself during a forward pass."""
    lock = threading.Lock()

    def locked(batch: Batch) -> Tensor:
        with lock:
            return forward(batch)

    return locked


def valid_text(text: Input) -> str:
    """Return the text. Raises DataError for other types, and for half of a surrogate pair, which cannot be encoded."""
    if not isinstance(text, str):
        raise DataError(f"a model of texts takes texts, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"character {error.start + 1} is half of a surrogate pair, which is no character") from None
    return text
