"""The model that is served, and the way from a request's inputs to probabilities."""

import asyncio
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from lockstep.errors import ModelError
from lockstep.inference.predictor import Predictor
from lockstep.serving.batcher import Batcher
from lockstep.serving.inputs import encoded
from lockstep.serving.meters import Meters
from lockstep.serving.settings import Settings
from lockstep.world import cores

LARGE = 8192
"""Characters or bytes; what is larger is encoded in a thread, so that others need not wait."""


class Model:
    """The model that is served just now, and how it is replaced."""

    def __init__(self, load: Callable[[], Predictor]) -> None:
        self.load = load
        self.current = self._ready()
        self._lock = asyncio.Lock()

    def _ready(self) -> Predictor:
        """A model that has predicted once: the first pass of any takes longest."""
        predictor = self.load()
        try:
            for size in (1, 2):
                found = predictor.probabilities(encoded(predictor, [example(predictor)] * size, "example"))
        except Exception as error:  # of torch, of onnxruntime, of somebody's own code
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"{predictor.facts.title} cannot predict ({type(error).__name__}: {reason})") from error
        if found.shape != (2, len(predictor.labels)) or not np.isfinite(found).all():
            raise ModelError(f"{predictor.facts.title} gives {found.tolist()}, not probabilities of its labels")
        return predictor

    async def reload(self) -> tuple[str, str]:
        """Load it anew, and then put it in place -> the titles before and after. Raises LockstepError.

        Requests go on meanwhile, and those that were encoded for the old one are answered by it.
        """
        async with self._lock:
            before, after = self.current, await asyncio.to_thread(self._ready)
            if (before.tokenizer is None) != (after.tokenizer is None):
                raise ModelError(f"{after.facts.title} takes {after.facts.modality}s: start another server for it")
            self.current = after
            return before.facts.title, after.facts.title


def example(predictor: Predictor) -> str | bytes:
    """Something to predict for a model that takes it: a headline, or a picture with a stroke like a one."""
    if predictor.tokenizer is not None:
        return "Central bank raises its interest rate by a quarter of a point"
    assert predictor.facts.image_shape is not None
    channels, height, width = predictor.facts.image_shape
    image = Image.new("L" if channels == 1 else "RGB", (width, height))
    middle, thickness = width // 2, max(1, width // 10)
    ImageDraw.Draw(image).line((middle, height // 5, middle, height - height // 5), "white", thickness)
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class Service:
    """The model, its queue and its counters: what the routes share."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.settings, self.meters = model, settings, Meters()
        self.is_draining = False
        self.batcher = Batcher(
            max_batch=settings.max_batch,
            max_wait_seconds=settings.max_wait_seconds,
            capacity=settings.queue,
            workers=cores() if model.current.is_parallel else 1,
            ran=self.meters.ran,
        )
        self.meters.watch_queue(lambda: self.batcher.depth)

    @property
    def takes(self) -> str:
        """ "text" or "image"."""
        return "text" if self.model.current.tokenizer is not None else "image"

    async def predict(self, inputs: list[Any], field: str) -> tuple[Predictor, np.ndarray]:
        """Probabilities [n, classes], and the model that they are of. Raises Wrong, Full, TimeoutError."""
        predictor = self.model.current
        async with asyncio.timeout(self.settings.timeout_seconds):
            if predictor.tokenizer is None or sum(map(len, inputs)) > LARGE:  # a small file may be a large image
                samples = await asyncio.to_thread(encoded, predictor, inputs, field)
            else:
                samples = encoded(predictor, inputs, field)
            return predictor, await self.batcher.predict(predictor, samples)


def answer(predictor: Predictor, probabilities: np.ndarray) -> dict[str, Any]:
    """The prediction for one input."""
    best = int(probabilities.argmax())
    return {
        "label": predictor.labels[best],
        "confidence": float(probabilities[best]),
        "probabilities": dict(zip(predictor.labels, map(float, probabilities), strict=True)),
    }
