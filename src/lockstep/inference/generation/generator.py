"""A language model with its tokenizer: from prompts to completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from pydantic import BaseModel, Field

from lockstep.base.errors import DataError, ModelError
from lockstep.base.json_values import with_texts
from lockstep.base.model_contracts import Forward, Model
from lockstep.core.numerics.special_tokens import without_marks
from lockstep.data.chat import ChatTokenizer
from lockstep.data.chat_forms import Message, messages_of
from lockstep.data.chat_template import Template
from lockstep.data.packing import BEGIN
from lockstep.data.text_tokenizers import Special, TextTokenizer
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.generation.decoding import KEPT, caches_well, decoding_of
from lockstep.inference.generation.sampling import Sampling, next_token
from lockstep.inference.predictor import use_errors, valid_text

CONTEXT = 256
"""Context of a model whose number of tokens in training is unknown."""
UNFINISHED = "\ufffd"
"""Replacement of an incomplete character at the end of decoded bytes."""


@dataclass(kw_only=True, eq=False)
class Completion:
    """A completion that is being generated."""

    prompt: list[int]
    sampling: Sampling
    is_truncated: bool = False
    """Whether the beginning of the prompt was left out."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    """Text that later tokens cannot change: without an incomplete character, or what may become a stop text."""
    finish: str = ""
    """Reason of its end: "end" (by the model), "stop" (a stop text), "length" (max_tokens, full context); "" before."""

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.sampling.seed)


class Generated(BaseModel):
    """A completion."""

    text: str
    finish: str = Field(
        description="end: the text is complete; stop: a stop text came; length: max_tokens, or the context is full."
    )
    tokens: int
    prompt_tokens: int = Field(description="Those that the model has read of the prompt.")
    truncated: bool = Field(description="Whether the prompt was too long, and its beginning left out.")
    seed: int
    model: str = Field(description="Name and digest.")


class LongPrompt(DataError):
    """A prompt has more tokens than the model reads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Generator:
    """A language model with its tokenizer. Not thread-safe."""

    takes: ClassVar[str] = "text"
    facts: ExportFacts
    forward: Forward
    tokenizer: TextTokenizer
    device: torch.device
    context: int
    """T: maximum number of tokens that the model reads at once, including those of a prompt."""
    caches: bool = True

    def completion(self, prompt: str | Sequence[Message], sampling: Sampling) -> Completion:
        """Begin a completion of a text, or of a chat. A chat model takes a text as a message of the user, unless
        `sampling.is_raw`. Raises DataError for a text that cannot be encoded, and for a chat if this is no chat model;
        LongPrompt for one longer than the context without `sampling.truncate`."""
        if not isinstance(prompt, str) and not self.is_chat:
            raise DataError("this model has not learned chats: give a prompt")
        if isinstance(self.tokenizer, ChatTokenizer) and not (sampling.is_raw and isinstance(prompt, str)):
            messages = messages_of([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            tokens = self.tokenizer.prompt(with_texts(messages, valid_text), on=sampling.date, tools=sampling.tools)
        else:
            assert isinstance(prompt, str)
            plain = self.tokenizer.inner if isinstance(self.tokenizer, ChatTokenizer) else self.tokenizer
            (encoded,) = plain([BEGIN + without_marks(valid_text(prompt))])
            tokens = encoded.tolist()
        is_long = len(tokens) > self.context
        if is_long and not sampling.truncate:
            raise LongPrompt(
                f"the prompt has {len(tokens):,} tokens, more than the {self.context:,} that the model reads: shorten "
                "it, or set truncate=true, which leaves out its beginning"
            )
        if is_long:
            tokens = self._truncate(tokens, sampling.max_tokens)
        return Completion(prompt=tokens or [self.tokenizer.pad_id], sampling=sampling, is_truncated=is_long)

    def result(self, completion: Completion) -> Generated:
        return Generated(
            text=completion.text,
            finish=completion.finish,
            tokens=len(completion.tokens),
            prompt_tokens=len(completion.prompt),
            truncated=completion.is_truncated,
            seed=completion.sampling.seed,
            model=self.facts.title,
        )

    @property
    def is_chat(self) -> bool:
        return isinstance(self.tokenizer, ChatTokenizer)

    @property
    def template(self) -> Template | None:
        """Chat template; None for a model without chats, or with the plain format."""
        return self.tokenizer.template if self.is_chat else None

    @cached_property
    def special(self) -> Special:
        """Special tokens; those that end a text are of the tokenizer, the chat template and the model's settings."""
        special = self.tokenizer.special()
        return replace(special, ends=tuple({*special.ends, *self.facts.ends}))

    def _truncate(self, tokens: list[int], room: int) -> list[int]:
        """Return the end of a prompt, after the tokens that begin a text; leaves some of the context to complete it."""
        size = max(1, int(self.context * KEPT), self.context - room)
        begin = self.tokenizer.begin if [*tokens[: len(self.tokenizer.begin)]] == self.tokenizer.begin else []
        return [*begin, *tokens[len(begin) :][-max(1, size - len(begin)) :]]

    def complete(self, prompts: Sequence[str | Sequence[Message]], sampling: Sampling) -> list[Completion]:
        """Complete several prompts or chats together; the seed of each is the sampling's plus its number."""
        numbered = enumerate(prompts, sampling.seed)
        return self.finish([self.completion(prompt, replace(sampling, seed=seed)) for seed, prompt in numbered])

    def finish(self, made: list[Completion]) -> list[Completion]:
        """Generate the rest of several completions in one batch."""
        if made:
            batch = GeneratedBatch(self)
            batch.join(made)
            while batch.rows:
                batch.step()
        return made


class GeneratedBatch:
    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.rows: list[Completion] = []
        self.decoding = decoding_of(generator.forward, generator.context, generator.device, caches=generator.caches)

    def join(self, completions: Sequence[Completion]) -> None:
        """Read prompts, and add their completions."""
        with torch.inference_mode():
            self.decoding.join([each.prompt for each in completions])
        self.rows += completions

    def drop(self, completions: Sequence[Completion]) -> None:
        """Remove completions before their end."""
        self._keep([number for number, row in enumerate(self.rows) if row not in completions])

    def step(self) -> None:
        """Add a token to each, and drop those that have ended. Raises ModelError for logits that are not finite."""
        logits = self.decoding.logits.float().cpu()
        if not torch.isfinite(logits).all():
            raise ModelError(f"the outputs of {self.generator.facts.title} are not finite: use another --dtype")
        for row, scores in zip(self.rows, logits, strict=True):
            self._add(row, next_token(scores, row.sampling, row.generator))
        self._keep([number for number, row in enumerate(self.rows) if not row.finish])
        if self.rows:
            with torch.inference_mode():
                self.decoding.read([row.tokens[-1] for row in self.rows])

    def _keep(self, kept: list[int]) -> None:
        if len(kept) < len(self.rows):
            self.rows = [self.rows[number] for number in kept]
            self.decoding.keep(kept)

    def _add(self, row: Completion, token: int) -> None:
        special, sampling = self.generator.special, row.sampling
        if token in special.ends:
            row.finish = "end"
        else:
            row.tokens.append(token)
        # text that was sent cannot change
        whole = row.text + self.generator.tokenizer.text_after(row.prompt, row.tokens)[len(row.text) :]
        stops = (*special.end_texts, *sampling.stop)
        places = [(place, stop) for stop in stops if (place := whole.find(stop)) >= 0]
        if places:
            place, stop = min(places)
            row.text, row.finish = whole[:place], "end" if stop in special.end_texts else "stop"
        elif row.finish or len(row.tokens) >= sampling.max_tokens or self._is_full(row):
            row.text, row.finish = whole, row.finish or "length"
        else:
            row.text = _stable_text(whole, stops)

    def _is_full(self, row: Completion) -> bool:
        forward = self.generator.forward
        slides = forward.SLIDES if isinstance(forward, Model) else True
        return not slides and len(row.prompt) + len(row.tokens) >= self.generator.context


def _stable_text(text: str, stop: Sequence[str]) -> str:
    """Return the text without an incomplete character at its end, or the beginning of a stop text."""
    text = text.rstrip(UNFINISHED)
    held = (size for each in stop for size in range(len(each) - 1, 0, -1) if text.endswith(each[:size]))
    return text[: len(text) - max(held, default=0)]


def generator(facts: ExportFacts, forward: Forward, tokenizer: TextTokenizer, *, device: torch.device) -> Generator:
    """Build a generator of a model on a device. Raises ModelError if the model fails."""
    context = int(facts.recipe.get("data", {}).get("context", CONTEXT))
    if isinstance(forward, Model) and not facts.model.get("from_config"):  # others know no positions beyond it
        context = forward.longest or context
    made = Generator(facts=facts, forward=forward, tokenizer=tokenizer, device=device, context=context)
    with use_errors(f"{facts.title} cannot complete a text"):
        if isinstance(forward, Model) and forward.CACHES:
            made = replace(made, caches=caches_well(forward, context, device))
        made.complete(["a", "ab"], Sampling(max_tokens=2))
    return made
