"""The model that is served, and the way from a request's inputs to probabilities."""

import asyncio
import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from lockstep.base.contracts import samples_of
from lockstep.base.errors import ModelError
from lockstep.base.world import cores
from lockstep.inference.predictor import Predictor, Sample
from lockstep.inference.serving.batcher import Batcher
from lockstep.inference.serving.request_inputs import InvalidInput, encoded_image, encoded_texts
from lockstep.inference.serving.server_metrics import Meters
from lockstep.inference.serving.serving_config import Settings

Example = tuple[dict[str, Any], dict[str, Any]]
"""A request and the answer that it really gets, as JSON."""
LARGE = 8192
"""Characters or bytes; what is larger is read and encoded in a thread, so that others need not wait."""


class ServedModel:
    """The model that is served just now, and how it is replaced."""

    def __init__(self, load: Callable[[], Predictor]) -> None:
        self.load = load
        self.changed: Callable[[], None] = lambda: None
        """Called in the event loop when another model has taken the place."""
        self._threads = torch.get_num_threads()
        self.current, self.example = self._ready()
        self._lock = asyncio.Lock()
        self._reloads: set[asyncio.Task[tuple[str, str]]] = set()

    def _ready(self) -> tuple[Predictor, Example]:
        """A model that has predicted, since the first pass of any takes longest, and what it said of its example.

        In a thread that ends with it: those that OpenMP keeps for it would slow others down (see Batcher).
        """
        once = ThreadPoolExecutor(1, "lockstep-load")
        try:
            return once.submit(self._opened).result()
        finally:
            once.shutdown(wait=False)

    def _opened(self) -> tuple[Predictor, Example]:
        torch.set_num_threads(self._threads)  # else as many as whoever set it last
        predictor = self.load()
        given = example(predictor)
        try:
            for size in (1, 2):
                found = predictor.probabilities(predictor.encode([given] * size))
        except Exception as error:  # of torch, of onnxruntime, of somebody's own code
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"{predictor.facts.title} cannot predict ({type(error).__name__}: {reason})") from error
        if found.shape != (2, len(predictor.labels)) or not np.isfinite(found).all():
            raise ModelError(f"{predictor.facts.title} gives {found.tolist()}, not probabilities of its labels")
        asked = {"text": given} if isinstance(given, str) else {"image": base64.b64encode(given).decode()}
        return predictor, (asked, {**answer(predictor, found[0]), "model": predictor.facts.title})

    async def reload(self) -> tuple[str, str]:
        """Load it anew, and then put it in place -> the titles before and after. Raises LockstepError.

        Requests go on meanwhile, and those that were encoded for the old one are answered by it. It comes to its end
        also where nobody waits for that any more.
        """
        task = asyncio.ensure_future(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    async def _reload(self) -> tuple[str, str]:
        async with self._lock:
            before, (after, told) = self.current, await asyncio.to_thread(self._ready)
            if (before.tokenizer is None) != (after.tokenizer is None):
                takes = samples_of(after.facts.modality)
                raise ModelError(f"{after.facts.title} takes {takes}: start another server for it")
            self.current, self.example = after, told
            self.changed()
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

    def __init__(self, model: ServedModel, settings: Settings) -> None:
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
        return "text" if self.model.current.tokenizer is not None else "image"

    async def predict(self, inputs: list[Any], field: str) -> tuple[Predictor, np.ndarray]:
        """Probabilities [n, classes], and the model that they are of. Raises Wrong, Full, TimeoutError."""
        if len(inputs) > self.settings.queue:
            raise InvalidInput([(field, f"this server takes {self.settings.queue} at a time")])
        predictor = self.model.current
        async with asyncio.timeout(self.settings.timeout_seconds):
            samples = await self._encoded(predictor, inputs, field)
            return predictor, await self.batcher.predict(predictor, samples)

    async def _encoded(self, predictor: Predictor, inputs: list[Any], field: str) -> list[Sample]:
        """What the model takes of them; others are answered meanwhile, and once the time is over no more is done."""
        if predictor.tokenizer is None:  # one by one, as a small file may be a large image
            fields = [f"{field}.{number}" for number in range(len(inputs))] if field == "images" else [field]
            pairs = zip(inputs, fields, strict=True)
            return [await asyncio.to_thread(encoded_image, predictor, file, place) for file, place in pairs]
        if sum(map(len, inputs)) > LARGE:
            return await asyncio.to_thread(encoded_texts, predictor, inputs, field)
        return encoded_texts(predictor, inputs, field)


def answer(predictor: Predictor, probabilities: np.ndarray) -> dict[str, Any]:
    best = int(probabilities.argmax())
    return {
        "label": predictor.labels[best],
        "confidence": float(probabilities[best]),
        "probabilities": dict(zip(predictor.labels, map(float, probabilities), strict=True)),
    }
