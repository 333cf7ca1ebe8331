"""POST /generate: the completion of a prompt, whole or as a stream of server-sent events."""

import asyncio
import datetime
import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from lockstep.data.chat_forms import Message
from lockstep.inference.generation.generated import Generated, generated
from lockstep.inference.generation.sampling import Sampling
from lockstep.inference.serving import openapi
from lockstep.inference.serving.request_inputs import JSON, Body, Filled, InvalidInput, faults_of
from lockstep.inference.serving.service import GenerationService

EVENTS = "text/event-stream"
MOST_TOKENS, MOST_STOPS = 4096, 16
MOST_SEED = 2**31
AnyBody = TypeVar("AnyBody", bound=BaseModel)


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

    @property
    def given(self) -> str | list[Message]:
        return (
            [each.model_dump(exclude_none=True) for each in self.messages]
            if self.prompt is None and self.messages
            else self.prompt or ""
        )


def add(app: Any, service: GenerationService) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse, StreamingResponse

    request_example, response_example = service.example
    described = openapi.generate(GenerationRequest, Generated, request=request_example, response=response_example)

    @app.post("/generate", **described)  # type: ignore[untyped-decorator]
    async def generate(request: Request) -> Any:
        """The text that follows a prompt."""
        asked = await body_of(request, GenerationRequest)
        generator, completion = await asyncio.to_thread(service.begun, asked.given, _sampling(asked))
        pieces = service.pieces(generator, completion)
        if not asked.stream:
            async for _ in pieces:
                pass
            return JSONResponse(generated(generator, completion).model_dump())
        first = await anext(pieces, "")  # raises Full before the response starts

        def last() -> dict[str, Any]:
            return generated(generator, completion).model_dump(exclude={"text"})

        return StreamingResponse(_events(first, pieces, last), media_type=EVENTS)


async def body_of(request: Any, kind: type[AnyBody]) -> AnyBody:
    """Return the JSON body of a request. Raises InvalidInput, which names the fields."""
    media_type = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media_type != JSON:
        raise InvalidInput([("content-type", f"should be {JSON}")], status=415)
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise InvalidInput(faults_of(error)) from None


def _sampling(asked: GenerationRequest) -> Sampling:
    seed = secrets.randbelow(MOST_SEED) if asked.seed is None else asked.seed
    values = asked.model_dump(include={"max_tokens", "temperature", "top_p", "date", "truncate", "tools"})
    return Sampling(seed=seed, stop=tuple(asked.stop), **values)


async def _events(first: str, pieces: AsyncIterator[str], last: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
    """Yield {"text": piece} for each piece, then the facts of the completion without its text; or {"error": why}."""
    try:
        if first:
            yield event({"text": first})
        async for piece in pieces:
            yield event({"text": piece})
        yield event(last())
    except TimeoutError:
        yield event({"error": "the completion took too long"})
    except Exception:  # the response has started: its status cannot change
        yield event({"error": "the model failed on this; the server's log says how"})
        raise


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
