"""The served model, and the path from a request's inputs to probabilities."""

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
from lockstep.inference.serving.server_metrics import ServerMetrics
from lockstep.inference.serving.serving_config import Settings

Example = tuple[dict[str, Any], dict[str, Any]]
"""A request and the model's actual response, as JSON."""
LARGE = 8192
"""Characters or bytes; larger inputs are encoded in a thread, so that other requests need not wait."""


class ServedModel:
    """The current model, which can be reloaded."""

    def __init__(self, load: Callable[[], Predictor]) -> None:
        self.load = load
        self.changed: Callable[[], None] = lambda: None
        """Called in the event loop after a reload."""
        self._threads = torch.get_num_threads()
        self.current, self.example = self._load()
        self._lock = asyncio.Lock()
        self._reloads: set[asyncio.Task[tuple[str, str]]] = set()

    def _load(self) -> tuple[Predictor, Example]:
        """A model that is warmed up, and its example; in a thread of its own, as OpenMP threads that stay alive would
        slow others down (see Batcher)."""
        executor = ThreadPoolExecutor(1, "lockstep-load")
        try:
            return executor.submit(self._warmed_up).result()
        finally:
            executor.shutdown(wait=False)

    def _warmed_up(self) -> tuple[Predictor, Example]:
        torch.set_num_threads(self._threads)  # another thread may have set it
        predictor = self.load()
        sample = example_input(predictor)
        try:
            for size in (1, 2):
                probabilities = predictor.probabilities(predictor.encode([sample] * size))
        except Exception as error:  # of torch, of onnxruntime, of a user's code
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"{predictor.facts.title} cannot predict ({type(error).__name__}: {reason})") from error
        if probabilities.shape != (2, len(predictor.labels)) or not np.isfinite(probabilities).all():
            raise ModelError(f"{predictor.facts.title} gives {probabilities.tolist()}, not probabilities of its labels")
        request = {"text": sample} if isinstance(sample, str) else {"image": base64.b64encode(sample).decode()}
        return predictor, (request, {**answer(predictor, probabilities[0]), "model": predictor.facts.title})

    async def reload(self) -> tuple[str, str]:
        """Load the model again, then replace the current one -> the titles before and after. Raises LockstepError.

        Requests continue meanwhile, and those that were encoded for the old model are answered by it. Cancelling the
        caller does not cancel the reload.
        """
        task = asyncio.ensure_future(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    async def _reload(self) -> tuple[str, str]:
        async with self._lock:
            before, (after, example) = self.current, await asyncio.to_thread(self._load)
            if (before.tokenizer is None) != (after.tokenizer is None):
                takes = samples_of(after.facts.modality)
                raise ModelError(f"{after.facts.title} takes {takes}: start another server for it")
            self.current, self.example = after, example
            self.changed()
            return before.facts.title, after.facts.title


def example_input(predictor: Predictor) -> str | bytes:
    """A headline, or an image of a vertical line."""
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
    """The state that the routes share: model, batcher, metrics."""

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        self.model, self.settings, self.metrics = model, settings, ServerMetrics()
        self.is_draining = False
        self.batcher = Batcher(
            max_batch=settings.max_batch,
            max_wait_seconds=settings.max_wait_seconds,
            capacity=settings.queue,
            workers=cores() if model.current.is_parallel else 1,
            on_batch=self.metrics.record_batch,
        )
        self.metrics.watch_queue(lambda: self.batcher.depth)

    @property
    def takes(self) -> str:
        return "text" if self.model.current.tokenizer is not None else "image"

    async def predict(self, inputs: list[Any], field: str) -> tuple[Predictor, np.ndarray]:
        """The model and its probabilities [n, classes]. Raises InvalidInput, Full, TimeoutError."""
        if len(inputs) > self.settings.queue:
            raise InvalidInput([(field, f"this server takes {self.settings.queue} at a time")])
        predictor = self.model.current
        async with asyncio.timeout(self.settings.timeout_seconds):
            samples = await self._encoded(predictor, inputs, field)
            return predictor, await self.batcher.predict(predictor, samples)

    async def _encoded(self, predictor: Predictor, inputs: list[Any], field: str) -> list[Sample]:
        """The model's inputs, encoded without blocking other requests."""
        if predictor.tokenizer is None:  # one by one, so that a timeout stops it: a small file may be a large image
            fields = [f"{field}.{number}" for number in range(len(inputs))] if field == "images" else [field]
            pairs = zip(inputs, fields, strict=True)
            return [await asyncio.to_thread(encoded_image, predictor, file, name) for file, name in pairs]
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
