"""POST /generate: the completion of a prompt, whole or as a stream of server-sent events."""

import asyncio
import datetime
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Annotated, Any, Self

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field, model_validator

from lockstep.data.chat_forms import Message
from lockstep.inference.generation.generator import Generated
from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.serving import openapi
from lockstep.inference.serving.request_inputs import JSON, AnyBody, Body, Filled, InvalidInput, media_type_of, parsed
from lockstep.inference.serving.service import GenerationService

MOST_TOKENS, MOST_STOPS = 4096, 16
MOST_SEED = 2**31
FAILED = "the model failed on this; the server's log says how"
Pieces = AsyncIterator[tuple[int, str]]
"""Pieces of texts, each with the number of its completion."""


class ChatMessage(Body):
    """A message of a chat."""

    role: Filled = Field(description="user, assistant, or another that the model has learned.")
    content: str | list[dict[str, Any]] | None = Field(
        None, description="A text, or parts that are texts; nothing beside calls of functions."
    )
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="The thought of an answer, for a template that writes it.")


class GenerationRequest(Body):
    """A prompt, or the messages of a chat, and how to go on from it."""

    prompt: str | None = Field(None, description="A text to go on from.")
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = Field(
        None, description="In place of a prompt, for a model that has learned chats."
    )
    tools: list[dict[str, Any]] | None = Field(None, description="Schemas of functions, for the chat template.")
    max_tokens: int = Field(128, ge=1, le=MOST_TOKENS)
    temperature: float = Field(0.8, ge=0, le=10, description="0: always the most probable token.")
    top_p: float = Field(1.0, gt=0, le=1, description="Draw only from the most probable tokens that add up to this.")
    seed: int | None = Field(None, ge=0, lt=MOST_SEED, description="The same seed gives the same text again.")
    stop: list[Filled] = Field([], max_length=MOST_STOPS, description="Texts before which the completion ends.")
    date: datetime.date | None = Field(None, description="The day that a chat template is told; else the day it is.")
    truncate: bool = Field(
        False,  # noqa: FBT003
        description="Leave out the beginning of a prompt that is longer than the model's context, instead of an error.",
    )
    stream: bool = Field(False, description="Send pieces of the text as server-sent events.")  # noqa: FBT003

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    def sampling(self) -> Sampling:
        seed = secrets.randbelow(MOST_SEED) if self.seed is None else self.seed
        values = self.model_dump(include={"max_tokens", "temperature", "top_p", "date", "truncate", "tools"})
        return Sampling(seed=seed, stop=tuple(self.stop), **values)

    @property
    def given(self) -> str | list[Message]:
        if self.prompt is None and self.messages:
            return [each.model_dump(exclude_none=True) for each in self.messages]
        return self.prompt or ""


def add(app: FastAPI, service: GenerationService) -> None:
    @app.post("/generate", **openapi.generate(GenerationRequest, Generated, service.example))
    async def generate(request: Request) -> Any:
        """The text that follows a prompt."""
        asked = await body_of(request, GenerationRequest)
        generator = service.generator
        completion = await asyncio.to_thread(service.begun, generator, asked.given, asked.sampling())

        def whole() -> dict[str, Any]:
            return generator.result(completion).model_dump()

        async def events(pieces: Pieces) -> AsyncIterator[dict[str, Any]]:
            """Yield {"text": piece} for each piece, then the facts of the completion without its text."""
            async for _, piece in pieces:
                yield {"text": piece}
            yield generator.result(completion).model_dump(exclude={"text"})

        found = service.pieces(generator, [completion])
        return await respond(found, whole, events if asked.stream else None, problem=lambda why, _: {"error": why})


async def respond(
    pieces: AsyncGenerator[tuple[int, str]],
    whole: Callable[[], dict[str, Any]],
    events: Callable[[Pieces], AsyncIterator[Any]] | None,
    *,
    problem: Callable[[str, int], dict[str, Any]],
    headers: dict[str, str] | None = None,
) -> Any:
    """Answer with the whole of a completion, or with the `events` that its pieces become, the last of which says why it
    ended early (`problem` of the reason and a status). Raises Full, before a response starts."""
    if events is None:
        async for _ in pieces:
            pass
        return JSONResponse(whole(), headers=headers)
    first = await anext(pieces, None)
    made = events(_with_first(first, pieces))
    return StreamingResponse(_stream(made, problem), media_type="text/event-stream", headers=headers)


async def _with_first(first: tuple[int, str] | None, pieces: Pieces) -> Pieces:
    if first is not None:
        yield first
    async for piece in pieces:
        yield piece


async def _stream(made: AsyncIterator[Any], problem: Callable[[str, int], dict[str, Any]]) -> AsyncIterator[str]:
    """Yield server-sent events: objects as JSON, texts as they are."""
    try:
        async for each in made:
            yield f"data: {each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)}\n\n"
    except TimeoutError:
        yield f"data: {json.dumps(problem('the completion took too long', 504))}\n\n"
    except Exception:  # the response has started: its status cannot change
        yield f"data: {json.dumps(problem(FAILED, 500))}\n\n"
        raise


async def body_of(request: Request, kind: type[AnyBody]) -> AnyBody:
    """Return the JSON body of a request. Raises InvalidInput, which names the fields."""
    if media_type_of(request) != JSON:
        raise InvalidInput([("content-type", f"should be {JSON}")], status=415)
    return parsed(await request.body(), kind)
