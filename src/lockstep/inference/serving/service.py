"""The served model, and the path from a request's inputs to predictions."""

import asyncio
import base64
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from PIL import Image, ImageDraw
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from lockstep.base.contracts import samples_of
from lockstep.base.errors import DataError, ModelError
from lockstep.base.world import cores
from lockstep.data.chat_forms import Message
from lockstep.data.sounds import tone
from lockstep.inference.generation.generator import Completion, Generator, LongPrompt
from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.predictor import Predictor, Sample, use_errors
from lockstep.inference.serving.batcher import Batcher, GenerationBatcher
from lockstep.inference.serving.request_inputs import InvalidInput, encoded_file, encoded_texts
from lockstep.models.objectives._objective import finite

Example = tuple[dict[str, Any], dict[str, Any]]
"""A request and the model's actual response, as JSON."""
PROMPT = "The "
LARGE = 8192
"""Characters or bytes; larger inputs are encoded in a thread, so that other requests need not wait."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Address and limits; a response that is caused by a limit names it."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Port; 0 takes any free one."""
    max_batch: int = 32
    """Largest number of inputs in a forward pass."""
    max_wait_seconds: float = 0.0
    """Time that the first input of a batch waits for others. 0: a batch is what arrived during the previous one."""
    queue: int = 1024
    """Maximum number of waiting inputs; beyond that, a request is answered with 503."""
    timeout_seconds: float = 30.0
    """Time from a request's arrival to its response, else 504. Also for its body to arrive, else 408."""
    body_bytes: int = 8 << 20
    """Maximum size of a request; a larger one is answered with 413."""
    drain_seconds: float = 20.0
    """Time to answer accepted requests after SIGTERM."""
    api_key: str | None = None
    """Key, required as `Authorization: Bearer KEY`, except for the page, /docs, /health and /ready."""


SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """Requests, latency, batches and the queue; in a registry of its own, as a process may hold several servers."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        here: dict[str, Any] = {"registry": self.registry}
        timed: dict[str, Any] = {"buckets": SECONDS, **here}
        self._requests = Counter("lockstep_requests", "Requests that were answered", ["path", "status"], **here)
        self._latency = Histogram("lockstep_request_seconds", "From request to answer", ["path"], **timed)
        self._size = Histogram("lockstep_batch_size", "Inputs predicted together", buckets=SIZES, **here)
        self._batch = Histogram("lockstep_batch_seconds", "Time of a forward pass", **timed)
        self.queue = Gauge("lockstep_queue_inputs", "Inputs that wait", **here)

    def record_response(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, status).inc()
        self._latency.labels(path).observe(seconds)

    def record_batch(self, size: int, seconds: float) -> None:
        self._size.observe(size)
        self._batch.observe(seconds)


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
        with use_errors(f"{model.facts.title} cannot predict"):
            return model, _completion_example(model) if isinstance(model, Generator) else _prediction_example(model)

    async def reload(self) -> tuple[str, str]:
        """Load the model again, then replace the current one -> the titles before and after. Raises LockstepError.
        Requests that were encoded for the old model are answered by it. Cancelling the caller does not cancel this."""
        task = asyncio.ensure_future(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    async def _reload(self) -> tuple[str, str]:
        async with self._lock:
            before, (after, example) = self.current, await asyncio.to_thread(self._load)
            if (type(before), before.takes) != (type(after), after.takes):
                takes = samples_of(after.facts.modality)
                raise ModelError(f"{after.facts.title} takes {takes}: start another server for it")
            self.current, self.example = after, example
            self.changed()
            return before.facts.title, after.facts.title


def _prediction_example(predictor: Predictor) -> Example:
    """Return an example, after batches of one and two. Raises ModelError for predictions that are not finite."""
    sample = example_input(predictor)
    for size in (1, 2):
        scores = predictor.scores(predictor.encode([sample] * size))
    if not finite(scores).all():
        raise ModelError(f"{predictor.facts.title} gives {scores.tolist()}, which are no predictions")
    request = {predictor.takes: sample if isinstance(sample, str) else base64.b64encode(sample).decode()}
    return request, {**predictor.answer(scores[0], sample), "model": predictor.facts.title}


def _completion_example(generator: Generator) -> Example:
    sampling = Sampling(max_tokens=16, seed=1)
    (made,) = generator.complete([PROMPT], sampling)
    request = {"prompt": PROMPT, "max_tokens": sampling.max_tokens, "seed": sampling.seed}
    return request, generator.result(made).model_dump()


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
    """The state that the routes share: model, settings, metrics, and what batches requests."""

    batcher: Batcher | GenerationBatcher

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        self.model, self.settings, self.metrics = model, settings, ServerMetrics()
        self.is_draining = False
        self.start()
        self.metrics.queue.set_function(lambda: self.batcher.depth)

    def start(self) -> None:
        """Start the threads of the batcher."""

    def close(self) -> None:
        """Answer what is queued, and accept nothing more."""
        self.batcher.close()

    @property
    def example(self) -> Example:
        """Example of the model, for the schema; without a response if a key is required, as the schema is public."""
        request, response = self.model.example
        return request, {} if self.settings.api_key else response


class PredictionService(Service):
    batcher: Batcher

    def start(self) -> None:
        self.batcher = Batcher(
            max_batch=self.settings.max_batch,
            max_wait_seconds=self.settings.max_wait_seconds,
            capacity=self.settings.queue,
            workers=cores() if self.predictor.is_parallel else 1,
            on_batch=self.metrics.record_batch,
        )

    @property
    def predictor(self) -> Predictor:
        assert isinstance(self.model.current, Predictor)
        return self.model.current

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
            is_batch = field == f"{predictor.takes}s"
            fields = [f"{field}.{number}" for number in range(len(inputs))] if is_batch else [field]
            pairs = zip(inputs, fields, strict=True)
            return [await asyncio.to_thread(encoded_file, predictor, file, name) for file, name in pairs]
        if sum(map(len, inputs)) > LARGE:
            return await asyncio.to_thread(encoded_texts, predictor, inputs, field)
        return encoded_texts(predictor, inputs, field)


class GenerationService(Service):
    batcher: GenerationBatcher

    def start(self) -> None:
        self.batcher = GenerationBatcher(
            max_batch=self.settings.max_batch, capacity=self.settings.queue, on_batch=self.metrics.record_batch
        )

    @property
    def generator(self) -> Generator:
        assert isinstance(self.model.current, Generator)
        return self.model.current

    def begun(self, generator: Generator, prompt: str | list[Message], sampling: Sampling) -> Completion:
        """Begin a completion. Raises InvalidInput."""
        try:
            return generator.completion(prompt, sampling)
        except DataError as error:
            code = "context_length_exceeded" if isinstance(error, LongPrompt) else None
            raise InvalidInput([("prompt" if isinstance(prompt, str) else "messages", str(error))], code=code) from None

    def pieces(self, generator: Generator, completions: Sequence[Completion]) -> AsyncGenerator[tuple[int, str]]:
        """Yield the completions, piece by piece. Raises Full, TimeoutError."""
        return self.batcher.pieces(generator, completions, seconds=self.settings.timeout_seconds)


def service_of(model: ServedModel, settings: Settings) -> Service:
    return (GenerationService if isinstance(model.current, Generator) else PredictionService)(model, settings)
