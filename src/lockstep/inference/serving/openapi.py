"""What OpenAPI tells of the routes, with examples that are true."""

from typing import Any

from pydantic import BaseModel, Field

from lockstep.inference.serving.request_inputs import BODIES, FORM, IMAGE_TYPES, JSON
from lockstep.inference.serving.serving_config import Settings

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self' https://huggingface.co https://*.hf.space",
    "cache-control": "no-cache",
}
"""The page may load nothing from elsewhere; Spaces show it in a frame."""


class Prediction(BaseModel):
    """What the model says of one input."""

    label: str
    confidence: float = Field(ge=0, le=1, description="The probability of that label.")
    probabilities: dict[str, float] = Field(description="Of every label.")


class Answer(Prediction):
    """The same, and who says it."""

    model: str = Field(description="Name and digest.")


class Answers(BaseModel):
    """What the model says of several inputs."""

    predictions: list[Prediction]
    model: str


class Fault(BaseModel):
    """A part of a request that is wrong."""

    field: str
    reason: str


class Problem(BaseModel):
    """Why there is no answer."""

    error: str
    detail: list[Fault] | None = None


def _problem(description: str) -> dict[str, Any]:
    return {"model": Problem, "description": description}


REFUSALS: dict[int | str, dict[str, Any]] = {
    401: _problem("The key is missing or wrong, where the server wants one."),
    408: _problem("The request did not come whole in time."),
    413: _problem("The request is too large."),
}
FAILURES: dict[int | str, dict[str, Any]] = {
    **REFUSALS,
    415: _problem("The body is of a type that cannot be read."),
    422: _problem("The input is wrong: which field, and why."),
    503: {
        **_problem("Too many requests wait."),
        "headers": {"Retry-After": {"schema": {"type": "string"}, "description": "Seconds."}},
    },
    504: _problem("The answer took too long."),
}
PREDICTING, MODEL, SERVER = "predict", "model", "server"
"""Tags: how /docs groups the routes."""
HEALTH: dict[str, Any] = {"tags": [SERVER], "responses": REFUSALS}
READY: dict[str, Any] = {"tags": [SERVER], "responses": {**REFUSALS, 503: _problem("The server is about to end.")}}
METRICS: dict[str, Any] = {
    "tags": [SERVER],
    "responses": {**REFUSALS, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
}
INFO: dict[str, Any] = {"tags": [MODEL], "responses": REFUSALS}
RELOAD: dict[str, Any] = {
    "tags": [MODEL],
    "responses": {
        **REFUSALS,
        403: _problem("Asked from elsewhere."),
        409: _problem("It cannot be loaded; the old one is still served."),
    },
}


def about(settings: Settings) -> dict[str, Any]:
    """Of the whole, where a key is wanted, so that the documentation's page asks for it."""
    from fastapi import Depends
    from fastapi.security import HTTPBearer

    return {
        "summary": "Labels for texts or images, from a model trained with Lockstep.",
        "version": "1",
        "openapi_tags": [
            {"name": PREDICTING, "description": "Labels of one input, or of several."},
            {"name": MODEL, "description": "What answers, and how to load a newer one."},
            {"name": SERVER, "description": "How the server is."},
        ],
        "redoc_url": None,
        "dependencies": [Depends(HTTPBearer(auto_error=False))] if settings.api_key else [],
    }


def predict(takes: str, asked: dict[str, Any], answered: dict[str, Any]) -> dict[str, Any]:
    """Of the route for one input."""
    content = {JSON: _json(takes, several=False, example=asked)}
    if takes == "image":
        file = {"type": "string", "format": "binary"}
        content |= {kind: {"schema": file} for kind in IMAGE_TYPES}
        form = {"type": "object", "properties": {"file": file}, "required": ["file"]}
        content[FORM] = {"schema": form}
    return _route(Answer, content, answered)


def predict_batch(takes: str, asked: dict[str, Any], answered: dict[str, Any]) -> dict[str, Any]:
    """Of the route for several."""
    (given,), prediction = asked.values(), {name: value for name, value in answered.items() if name != "model"}
    content = {JSON: _json(takes, several=True, example={f"{takes}s": [given]})}
    return _route(Answers, content, {"predictions": [prediction], "model": answered["model"]})


def _json(takes: str, *, several: bool, example: dict[str, Any]) -> dict[str, Any]:
    return {"schema": BODIES[takes, several].model_json_schema(), "example": example}


def _route(model: type[BaseModel], content: dict[str, Any], answered: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": [PREDICTING],
        "response_model": model,
        "responses": {200: {"content": {JSON: {"example": answered}}}, **FAILURES},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }
