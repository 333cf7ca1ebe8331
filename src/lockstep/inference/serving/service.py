"""The served model, and the path from a request's inputs to predictions."""

import asyncio
import base64
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from io import BytesIO
from typing import Any

import torch
from PIL import Image, ImageDraw

from lockstep.base.contracts import samples_of
from lockstep.base.errors import DataError, LockstepError, ModelError
from lockstep.base.world import cores
from lockstep.data.chat_forms import Message
from lockstep.data.sounds import tone
from lockstep.inference.generation.generated import generated
from lockstep.inference.generation.generator import Completion, Generator, LongPrompt
from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.predictor import Predictor, Sample
from lockstep.inference.serving.batcher import Batcher
from lockstep.inference.serving.generation_batcher import GenerationBatcher
from lockstep.inference.serving.request_inputs import InvalidInput, encoded_file, encoded_texts
from lockstep.inference.serving.server_metrics import ServerMetrics
from lockstep.inference.serving.serving_config import Settings
from lockstep.models.objectives._objective import finite

Example = tuple[dict[str, Any], dict[str, Any]]
"""A request and the model's actual response, as JSON."""
PROMPT = "The "
LARGE = 8192
"""Characters or bytes; larger inputs are encoded in a thread, so that other requests need not wait."""


class StillLoading(ModelError):
    """A model was not loaded in time; its thread goes on, as the model or its code may be an endless loop."""


class ServedModel:
    """The current model, which can be reloaded."""

    def __init__(self, load: Callable[[], Predictor | Generator], *, seconds: float) -> None:
        """Load and try the model within `seconds`. Raises StillLoading after them, and what `load` raises."""
        self.load, self.seconds = load, seconds
        self.changed: Callable[[], None] = lambda: None
        """Called in the event loop after a reload."""
        self._threads = torch.get_num_threads()
        self.current, self.example = self._load()
        self._lock = asyncio.Lock()
        self._reloads: set[asyncio.Task[tuple[str, str]]] = set()

    def _load(self) -> tuple[Predictor | Generator, Example]:
        """Return a warmed-up model and its example; in a thread of its own, as remaining OpenMP threads would slow
        others down (see Batcher)."""
        loaded: Future[tuple[Predictor | Generator, Example]] = Future()

        def run() -> None:
            try:
                loaded.set_result(self._warm_up())
            except BaseException as error:
                loaded.set_exception(error)

        threading.Thread(target=run, name="lockstep-load", daemon=True).start()
        try:
            return loaded.result(self.seconds)
        except TimeoutError:
            if loaded.done():
                raise
            reason = f"has not loaded and predicted within {self.seconds:g} s: it may have no end"
            raise StillLoading(f"the model {reason}; a longer --timeout gives it 20 times as long") from None

    def _warm_up(self) -> tuple[Predictor | Generator, Example]:
        torch.set_num_threads(self._threads)  # another thread may have set it
        model = self.load()
        try:
            return model, _completion_example(model) if isinstance(model, Generator) else _prediction_example(model)
        except LockstepError:
            raise
        except Exception as error:  # of torch, of onnxruntime, of a user's code
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"{model.facts.title} cannot predict ({type(error).__name__}: {reason})") from error

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
            if _kind(before) != _kind(after):
                takes = samples_of(after.facts.modality)
                raise ModelError(f"{after.facts.title} takes {takes}: start another server for it")
            self.current, self.example = after, example
            self.changed()
            return before.facts.title, after.facts.title


def _kind(model: Predictor | Generator) -> tuple[type, str]:
    """Return the properties of a model that a server is built for."""
    return type(model), _takes(model) if isinstance(model, Predictor) else ""


def _takes(predictor: Predictor) -> str:
    """Return the input: text, image or audio."""
    return predictor.reader.modality if predictor.reader is not None else "text"


def _prediction_example(predictor: Predictor) -> Example:
    """Return an example, after batches of one and two. Raises ModelError for predictions that are not finite."""
    sample = example_input(predictor)
    for size in (1, 2):
        scores = predictor.scores(predictor.encode([sample] * size))
    if not finite(scores).all():
        raise ModelError(f"{predictor.facts.title} gives {scores.tolist()}, which are no predictions")
    request = {_takes(predictor): sample if isinstance(sample, str) else base64.b64encode(sample).decode()}
    return request, {**predictor.answer(scores[0], sample), "model": predictor.facts.title}


def _completion_example(generator: Generator) -> Example:
    sampling = Sampling(max_tokens=16, seed=1)
    (made,) = generator.complete([PROMPT], sampling)
    request = {"prompt": PROMPT, "max_tokens": sampling.max_tokens, "seed": sampling.seed}
    return request, generated(generator, made).model_dump()


def example_input(predictor: Predictor) -> str | bytes:
    """Return a headline, an image of a vertical line, or the tone a'."""
    if predictor.reader is None:
        return "Central bank raises its interest rate by a quarter of a point"
    if predictor.reader.modality == "audio":
        return tone(440)
    assert predictor.facts.image_shape is not None
    channels, height, width = predictor.facts.image_shape
    image = Image.new("L" if channels == 1 else "RGB", (width, height))
    middle, thickness = width // 2, max(1, width // 10)
    ImageDraw.Draw(image).line((middle, height // 5, middle, height - height // 5), "white", thickness)
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class Service:
    """The state that the routes share: model, settings, metrics."""

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        self.model, self.settings, self.metrics = model, settings, ServerMetrics()
        self.is_draining = False

    @property
    def example(self) -> Example:
        """Example of the model, for the schema; without a response if a key is required, as the schema is public."""
        request, response = self.model.example
        return request, {} if self.settings.api_key else response

    def close(self) -> None:
        """Answer what is queued, and accept nothing more."""


class PredictionService(Service):
    """Predicts texts, images or sounds."""

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        self.batcher = Batcher(
            max_batch=settings.max_batch,
            max_wait_seconds=settings.max_wait_seconds,
            capacity=settings.queue,
            workers=cores() if self.predictor.is_parallel else 1,
            on_batch=self.metrics.record_batch,
        )
        self.metrics.watch_queue(lambda: self.batcher.depth)

    def close(self) -> None:
        self.batcher.close()

    @property
    def predictor(self) -> Predictor:
        assert isinstance(self.model.current, Predictor)
        return self.model.current

    @property
    def takes(self) -> str:
        return _takes(self.predictor)

    async def predict(self, inputs: list[Any], field: str) -> tuple[list[dict[str, Any]], str]:
        """Return the predictions, and the title of the model. Raises InvalidInput, Full, TimeoutError."""
        if len(inputs) > self.settings.queue:
            raise InvalidInput([(field, f"this server takes {self.settings.queue} at a time")])
        predictor = self.predictor
        async with asyncio.timeout(self.settings.timeout_seconds):
            samples = await self._encode(predictor, inputs, field)
            scores = await self.batcher.predict(predictor, samples)
        return [predictor.answer(*each) for each in zip(scores, inputs, strict=True)], predictor.facts.title

    async def _encode(self, predictor: Predictor, inputs: list[Any], field: str) -> list[Sample]:
        """Encode the inputs without blocking other requests."""
        if predictor.reader is not None:  # one by one, so that a timeout stops it: a small file may be a large image
            is_batch = field == f"{_takes(predictor)}s"
            fields = [f"{field}.{number}" for number in range(len(inputs))] if is_batch else [field]
            pairs = zip(inputs, fields, strict=True)
            return [await asyncio.to_thread(encoded_file, predictor, file, name) for file, name in pairs]
        if sum(map(len, inputs)) > LARGE:
            return await asyncio.to_thread(encoded_texts, predictor, inputs, field)
        return encoded_texts(predictor, inputs, field)


class GenerationService(Service):
    """Completes texts."""

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        self.batcher = GenerationBatcher(
            max_batch=settings.max_batch, capacity=settings.queue, on_batch=self.metrics.record_batch
        )
        self.metrics.watch_queue(lambda: self.batcher.depth)

    def close(self) -> None:
        self.batcher.close()

    def begun(self, prompt: str | list[Message], sampling: Sampling) -> tuple[Generator, Completion]:
        """Begin a completion of the current model. Raises InvalidInput."""
        generator = self.model.current
        assert isinstance(generator, Generator)
        try:
            return generator, generator.completion(prompt, sampling)
        except DataError as error:
            code = "context_length_exceeded" if isinstance(error, LongPrompt) else None
            raise InvalidInput([("prompt" if isinstance(prompt, str) else "messages", str(error))], code=code) from None

    def pieces(self, generator: Generator, completion: Completion) -> AsyncGenerator[str]:
        """Yield the completion, piece by piece. Raises Full, TimeoutError."""
        return self.batcher.pieces(generator, completion, seconds=self.settings.timeout_seconds)


def service_of(model: ServedModel, settings: Settings) -> Service:
    return (GenerationService if isinstance(model.current, Generator) else PredictionService)(model, settings)
