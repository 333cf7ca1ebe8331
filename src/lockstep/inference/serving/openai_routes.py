"""POST /v1/chat/completions and /v1/completions, GET /v1/models: the protocol that clients of OpenAI's API speak.

Source: https://platform.openai.com/docs/api-reference. Its own documentation describes the bodies; fields that have no
meaning here are ignored, and named in the header `x-ignored-fields`.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from lockstep.data.chat_forms import Message
from lockstep.inference.generation.generator import Generator
from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.serving.generation_routes import (
    MOST_SEED,
    MOST_STOPS,
    MOST_TOKENS,
    ChatMessage,
    body_of,
    respond,
)
from lockstep.inference.serving.request_inputs import Filled, InvalidInput
from lockstep.inference.serving.service import GenerationService

PREFIX, IGNORED = "/v1/", "x-ignored-fields"
MOST_CHOICES, MOST_NAMED, MOST_QUOTED = 16, 20, 60
FINISH = {"end": "stop", "stop": "stop", "length": "length"}
"""Reason why a completion ended -> its name in the protocol."""
ROLES = {"developer": "system"}
"""Role of newer clients -> its name in chat templates."""
REFUSED: dict[str, Sequence[Any]] = {
    "response_format": (None, {"type": "text"}),
    "logprobs": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "auto", "none"),
}
"""Fields without which the answer would be another one, and the values that ask for nothing."""
Prompt = str | list[Message]


class Tolerant(BaseModel):
    """An object that may have more fields than are used."""

    model_config = ConfigDict(extra="allow", strict=False)

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that have a value and are not used."""
        return [name for name, value in (self.model_extra or {}).items() if value is not None]


class StreamOptions(Tolerant):
    include_usage: bool = False


class ClientMessage(ChatMessage, Tolerant):
    def plain(self) -> Message:
        """Return the message as it is given to a model; some clients leave an empty content out."""
        given = self.model_dump(include={*ChatMessage.model_fields}, exclude_none=True)
        return {"content": None if self.tool_calls else "", **given, "role": ROLES.get(self.role, self.role)}


class ClientRequest(Tolerant):
    """Fields of both kinds of completions."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    stop: Filled | Annotated[list[Filled], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate: bool = False

    def refused(self) -> list[tuple[str, str]]:
        """Return fields that ask for what there is not, and the reason."""
        given = self.model_extra or {}
        return [
            (name, f"{json.dumps(given[name])[:MOST_QUOTED]} is not supported: leave it out")
            for name, harmless in REFUSED.items()
            if given.get(name) not in harmless
        ]

    def sampling(self, generator: Generator, number: int) -> Sampling:
        """Return the sampling of choice `number`; where nothing limits it, it may fill the model's context."""
        longest = min(MOST_TOKENS, generator.context)
        seed = secrets.randbelow(MOST_SEED) if self.seed is None else self.seed + number
        return Sampling(
            max_tokens=longest if self.max_tokens is None else min(self.max_tokens, MOST_TOKENS),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=seed % MOST_SEED,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            truncate=self.truncate,
        )


class ChatRequest(ClientRequest):
    """The messages of a chat, which the model answers."""

    messages: Annotated[list[ClientMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None

    def sampling(self, generator: Generator, number: int) -> Sampling:
        return replace(super().sampling(generator, number), tools=self.tools)

    def refused(self) -> list[tuple[str, str]]:
        empty = [
            (f"messages.{number}.content", "is missing")
            for number, each in enumerate(self.messages)
            if each.content is None and each.role != "assistant"
        ]
        return [*super().refused(), *empty]

    def prompts(self) -> list[Prompt]:
        return [[each.plain() for each in self.messages]]

    @property
    def ignored(self) -> list[str]:
        inner = {name: None for message in self.messages for name in message.ignored}
        return [*super().ignored, *(f"messages.{name}" for name in inner)]


class CompletionRequest(ClientRequest):
    """Texts, which the model continues."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]

    def sampling(self, generator: Generator, number: int) -> Sampling:
        return replace(super().sampling(generator, number), is_raw=True)

    def prompts(self) -> list[Prompt]:
        return [self.prompt] if isinstance(self.prompt, str) else [*self.prompt]


class Answer:
    """The choices of one request while they are generated, as the protocol shows them."""

    def __init__(self, service: GenerationService, asked: ChatRequest | CompletionRequest) -> None:
        """Begin the completions. Raises InvalidInput."""
        generator = service.generator
        facts, choices = generator.facts, asked.n or 1
        check_name(generator, asked.model)
        if refused := asked.refused():
            raise InvalidInput(refused)
        if isinstance(asked, ChatRequest) and asked.max_completion_tokens:
            asked.max_tokens = asked.max_completion_tokens
        self.is_chat, self.asked = isinstance(asked, ChatRequest), asked
        takes_tools = generator.template is not None and generator.template.takes_tools
        self.unused = ["tools"] if isinstance(asked, ChatRequest) and asked.tools and not takes_tools else []
        prompts, most = asked.prompts(), service.settings.queue
        if len(prompts) * choices > most:
            raise InvalidInput([("n", f"this server generates {most} completions at a time")])
        self.completions = [
            service.begun(generator, prompt, asked.sampling(generator, number))
            for prompt in prompts
            for number in range(choices)
        ]
        self.prompts = self.completions[::choices]
        self.pieces = service.pieces(generator, self.completions)
        self.common = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": facts.name,
            "system_fingerprint": facts.title,
            **({"truncated": True} if any(each.is_truncated for each in self.prompts) else {}),
        }

    @property
    def headers(self) -> dict[str, str]:
        """Header that names what was ignored."""
        names = [*self.asked.ignored, *self.unused]
        return {IGNORED: ", ".join(quote(name) for name in names[:MOST_NAMED])} if names else {}

    def whole(self) -> dict[str, Any]:
        """Return the answer, once all completions have ended."""
        choices = [
            {"index": number, **self._text(each.text), "logprobs": None, "finish_reason": FINISH[each.finish]}
            for number, each in enumerate(self.completions)
        ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self.common, "object": kind, "choices": choices, "usage": self._usage()}

    async def events(self, pieces: AsyncIterator[tuple[int, str]]) -> AsyncIterator[dict[str, Any] | str]:
        """Yield the answer in pieces, as objects of the protocol."""
        for number in range(len(self.completions)) if self.is_chat else ():
            yield self._chunk(number, {"delta": {"role": "assistant", "content": ""}})
        async for number, text in pieces:
            yield self._chunk(number, self._text(text, is_piece=True))
        for number, each in enumerate(self.completions):
            yield self._chunk(number, self._text("", is_piece=True), finish=FINISH[each.finish])
        if self.asked.stream_options and self.asked.stream_options.include_usage:
            yield {**self._about(), "choices": [], "usage": self._usage()}
        yield "[DONE]"

    def _text(self, text: str, *, is_piece: bool = False) -> dict[str, Any]:
        if not self.is_chat:
            return {"text": text}
        if is_piece:
            return {"delta": {"content": text} if text else {}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _chunk(self, number: int, content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": number, **content, "logprobs": None, "finish_reason": finish}
        return {**self._about(), "choices": [choice]}

    def _about(self) -> dict[str, Any]:
        return {**self.common, "object": "chat.completion.chunk" if self.is_chat else "text_completion"}

    def _usage(self) -> dict[str, int]:
        read, made = sum(len(each.prompt) for each in self.prompts), sum(len(each.tokens) for each in self.completions)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def problem(reason: str, status: int, *, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error in the protocol."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": reason, "type": kind, "param": field, "code": code}}


def add(app: FastAPI, service: GenerationService) -> None:
    @app.post("/v1/chat/completions", include_in_schema=False)
    async def chat(request: Request) -> Any:
        return await _respond(service, await body_of(request, ChatRequest))

    @app.post("/v1/completions", include_in_schema=False)
    async def complete(request: Request) -> Any:
        return await _respond(service, await body_of(request, CompletionRequest))

    @app.get("/v1/models", include_in_schema=False)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}", include_in_schema=False)
    async def model(name: str) -> dict[str, Any]:
        check_name(service.model.current, name)
        return _model(service)


async def _respond(service: GenerationService, asked: ChatRequest | CompletionRequest) -> Any:
    answer = await asyncio.to_thread(Answer, service, asked)
    events = answer.events if asked.stream else None
    return await respond(answer.pieces, answer.whole, events, problem=problem, headers=answer.headers)


def check_name(model: Any, name: str | None) -> None:
    """Raise InvalidInput for the name of another model; its name may be left out."""
    if name not in (None, "", model.facts.name, model.facts.title):
        raise InvalidInput(
            [("model", f"this server has {model.facts.name}, and no {name!r}")], status=404, code="model_not_found"
        )


def _model(service: GenerationService) -> dict[str, Any]:
    return {"id": service.model.current.facts.name, "object": "model", "created": 0, "owned_by": "lockstep"}
