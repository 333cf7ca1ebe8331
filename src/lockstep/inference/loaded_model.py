"""A trained model in Python: from texts, images, sounds or prompts to typed answers."""

import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack, overload

import numpy as np
from PIL import Image

from lockstep.base.errors import DataError, ModelError
from lockstep.data.chat_forms import Message, messages_of
from lockstep.inference import trained_model
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.generation.generator import Generated, GeneratedBatch, Generator
from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.predictor import DTypeName, Input, Predictor
from lockstep.models.objectives._answers import ClassAnswer, ClassesAnswer, NumbersAnswer, WordsAnswer
from lockstep.models.objectives._objective import finite

Prediction: TypeAlias = ClassAnswer | ClassesAnswer | NumbersAnswer | WordsAnswer | Generated
Given: TypeAlias = str | bytes | os.PathLike[str] | Image.Image | np.ndarray
"""A sample: a text or prompt; or the path of an image or sound file, its bytes, an image of Pillow, or its pixels."""
Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with "role" and "content"."""
Checked = TypeVar("Checked")
GREEDY = Sampling(max_tokens=64, temperature=0)
"""Sampling of a language model in predict()."""


class SamplingOptions(TypedDict, total=False):
    """Options of Sampling, without `is_raw`."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: Sequence[str]
    date: datetime.date | None
    tools: Sequence[Mapping[str, Any]] | None
    truncate: bool


@dataclass(frozen=True)
class LoadedModel:
    """A model loaded into this process. Not thread-safe."""

    model: Predictor | Generator

    @property
    def facts(self) -> ExportFacts:
        """Metadata of the model: name, digest, step, metrics, recipe, labels."""
        return self.model.facts

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes, in the order of the outputs; empty where the model learned none."""
        return self.facts.labels

    @overload
    def predict(self, samples: Given, *, batch: int = 64) -> Prediction: ...  # type: ignore[overload-overlap]

    @overload
    def predict(self, samples: Sequence[Given], *, batch: int = 64) -> list[Prediction]: ...

    def predict(self, samples: Given | Sequence[Given], *, batch: int = 64) -> Prediction | list[Prediction]:
        """Predict one sample, or a list of them in its order, `batch` at a time.

        A sample is a text; or of an image or a sound the path of its file or the file's bytes; or an image of Pillow,
        or its pixels, uint8 [H, W], [H, W, 3] or [1 or 3, H, W]. A language model takes prompts, and continues
        them with the most probable tokens: `generate` has the options.

        The answers are those of POST /predict. Raises DataError for a sample that the model does not take.
        """
        if batch < 1:
            raise DataError(f"batch is {batch}, and should be at least 1")
        is_list = isinstance(samples, list | tuple)
        given: list[Any] = list(samples) if is_list else [samples]  # type: ignore[arg-type]
        answers: list[Any] = []
        for start in range(0, len(given), batch):
            answers += self._answers(given[start : start + batch], start if is_list else None)
        return answers if is_list else answers[0]

    def _answers(self, given: Sequence[Any], first: int | None) -> Sequence[Prediction]:
        """Predict a batch; `first` is the index of its first sample in the list, None for a single sample."""
        if isinstance(self.model, Generator):
            return self._complete(_checked(_prompt, given, first), GREEDY)
        inputs = _checked(self._input, given, first)
        try:
            samples = self.model.encode(inputs)
        except DataError:  # of which one?
            _checked(lambda each: self.model.encode([each]), inputs, first)  # type: ignore[union-attr]
            raise
        scores = self.model.scores(samples)
        if not finite(scores).all():
            raise ModelError(f"the outputs of {self.facts.title} are not finite: use another dtype")
        answer = self.model.objective.Answer.model_validate
        return [answer(self.model.answer(*pair)) for pair in zip(scores, inputs, strict=True)]  # type: ignore[misc]

    def _input(self, given: Any) -> Input:
        """Return a sample as the predictor takes it. Raises DataError for another type."""
        assert isinstance(self.model, Predictor)
        reader, kind = self.model.reader, type(given).__name__
        if reader is None:
            if isinstance(given, str):
                return given
            raise DataError(f"{self.facts.title} takes texts, not {kind}")
        if isinstance(given, bytes):
            return given
        if isinstance(given, str | os.PathLike):
            return Path(given)
        if reader.modality != "image":
            what = "not its numbers: their rate is unknown"
        elif isinstance(given, Image.Image):
            return given
        elif isinstance(given, np.ndarray):
            return _image(given)
        else:
            what = "an image of Pillow, or pixels"
        raise DataError(f"give {reader.noun} as the path of a file, its bytes, {what}; not {kind}")

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: str, **options: Unpack[SamplingOptions]
    ) -> Generated: ...

    @overload
    def generate(self, prompt: Sequence[str], **options: Unpack[SamplingOptions]) -> list[Generated]: ...

    @overload
    def generate(self, prompt: Chat, **options: Unpack[SamplingOptions]) -> Generated: ...

    def generate(
        self, prompt: str | Sequence[str] | Chat, **options: Unpack[SamplingOptions]
    ) -> Generated | list[Generated]:
        """Continue a prompt, a list of prompts, or the messages of a chat.

        `options` are those of a Sampling: max_tokens=128, temperature=0.8, top_p=1.0, seed=0, stop=(), date=None (today
        in a chat template), tools=None (schemas of functions, for a chat template), truncate=False. The same seed
        gives the same text again, and each further prompt of a list takes the next seed. Raises UserError for a model
        that generates nothing, and for options and prompts that cannot be used, such as one longer than the model's
        context, whose beginning `truncate` leaves out.
        """
        sampling = Sampling(**options)
        is_list = isinstance(prompt, list | tuple) and not (prompt and isinstance(prompt[0], Mapping))
        given: list[Any] = list(prompt) if is_list else [prompt]
        found = self._complete(_checked(_prompt, given, 0 if is_list else None), sampling)
        return found if is_list else found[0]

    def stream(self, prompt: str | Chat, **options: Unpack[SamplingOptions]) -> Iterator[str]:
        """Yield the text that `generate` returns, piece by piece."""
        generator = self._generator()
        completion = generator.completion(_prompt(prompt), Sampling(**options))
        batch = GeneratedBatch(generator)
        batch.join([completion])
        sent = 0
        while batch.rows:
            batch.step()
            if len(completion.text) > sent:
                yield completion.text[sent:]
                sent = len(completion.text)

    def _complete(self, prompts: Sequence[Any], sampling: Sampling) -> list[Generated]:
        generator = self._generator()
        return [generator.result(made) for made in generator.complete(prompts, sampling)]

    def _generator(self) -> Generator:
        if not isinstance(self.model, Generator):
            raise ModelError(f"{self.facts.title} generates no text: use predict()")
        return self.model


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    dtype: DTypeName | None = None,
    base: str | None = None,
    trust_code: bool = False,
) -> LoadedModel:
    """Open an export, the best or newest checkpoint of a run, or a checkpoint, to predict with.

    `device` is auto (a GPU if there is one), cpu, cuda or cuda:N; `dtype` converts the weights; `base` is where
    the model of an exported adapter is now, a folder or a name on the hub; `trust_code` executes the code that lies in
    a folder which somebody else may have made. Raises UserError for what cannot be opened.
    """
    trained_model.authorize(Path(path), None, trusts=trust_code)
    return LoadedModel(trained_model.loader(Path(path), device=device, dtype=dtype, base=base)())


def _image(pixels: np.ndarray) -> Image.Image:
    """Convert pixels [H, W], [H, W, C] or [C, H, W] to an image. Raises DataError."""
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dtype != np.uint8 or pixels.size == 0 or not (pixels.ndim == 2 or pixels.shape[2:] in ((3,), (4,))):
        raise DataError(
            f"pixels should be uint8 from 0 to 255, of the shape [H, W], [H, W, 3] or [1 or 3, H, W]; "
            f"these are {pixels.dtype} {list(pixels.shape)}"
        )
    return Image.fromarray(np.ascontiguousarray(pixels))


def _prompt(given: Any) -> str | list[Message]:
    """Return a prompt or a chat. Raises DataError for anything else."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list | tuple):
        raise DataError(f"a prompt is a text, or a list of messages; not {type(given).__name__}")
    return messages_of(given)


def _checked(check: Callable[[Any], Checked], given: Sequence[Any], first: int | None) -> list[Checked]:
    """Return what `check` makes of each sample; its DataError names the number of a sample, from `first` on."""
    made = []
    for number, each in enumerate(given, first or 0):
        try:
            made.append(check(each))
        except DataError as error:
            raise DataError(f"{error}" if first is None else f"sample {number}: {error}") from error
    return made
