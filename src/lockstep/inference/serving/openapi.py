"""OpenAPI descriptions of the routes, with real examples."""

from typing import Any

from fastapi import Depends
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field, create_model

from lockstep.inference.serving.request_inputs import BODIES, FILE_TYPES, FORM, JSON
from lockstep.inference.serving.service import Example, Settings

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self' "
    "'unsafe-inline'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self' https://huggingface.co https://*.hf.space",
    "cache-control": "no-cache",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Headers of every response: the pages load nothing from other hosts; Spaces show them in a frame."""


class Fault(BaseModel):
    """An invalid field of a request."""

    field: str
    reason: str


class Problem(BaseModel):
    """Why there is no prediction."""

    error: str
    detail: list[Fault] | None = None


def _problem(description: str) -> dict[str, Any]:
    return {"model": Problem, "description": description}


REFUSALS: dict[int | str, dict[str, Any]] = {
    401: _problem("The API key is missing or wrong."),
    403: _problem("The request comes from a page of another site."),
    408: _problem("The request did not arrive in time."),
    413: _problem("The request is too large."),
    421: _problem("The request names another server."),
    431: _problem("The headers are too large."),
}
"""Responses of every route."""
FAILURES: dict[int | str, dict[str, Any]] = {
    415: _problem("The body has an unsupported media type."),
    422: _problem("The input is invalid: which field, and why."),
    503: {
        **_problem("Too many requests are waiting."),
        "headers": {"Retry-After": {"schema": {"type": "string"}, "description": "Seconds."}},
    },
    504: _problem("The prediction took too long."),
}
PREDICTING, MODEL, SERVER = "predict", "model", "server"
"""Tags: how /docs groups the routes."""
READY: dict[int | str, dict[str, Any]] = {503: _problem("The server is shutting down.")}
RELOAD: dict[int | str, dict[str, Any]] = {
    403: _problem("The request comes from another machine."),
    409: _problem("The model cannot be loaded; the previous one is still served."),
}
"""Responses of these routes alone."""


def about(settings: Settings) -> dict[str, Any]:
    """Return arguments of the application; with an API key, the documentation's page asks for it."""
    return {
        "summary": "Predictions for texts, images or sounds, from a model trained with Lockstep.",
        "version": "1",
        "openapi_tags": [
            {"name": PREDICTING, "description": "Predictions for one input, or for several."},
            {"name": MODEL, "description": "The model that is served, and how to reload it."},
            {"name": SERVER, "description": "Status of the server."},
        ],
        "redoc_url": None,
        "responses": REFUSALS,
        "dependencies": [Depends(HTTPBearer(auto_error=False))] if settings.api_key else [],
    }


def predict(takes: str, prediction: Any, *, several: bool, example: Example) -> dict[str, Any]:
    """Return arguments of the route for one input, or for several, by the example for one."""
    request, response = example
    name, about, base = "Answer", "A prediction, and the model that made it.", prediction
    fields: Any = {"model": (str, Field(description="Name and digest."))}
    if several:
        name, about, base = "Answers", "The predictions for several inputs.", BaseModel
        fields = {"predictions": (list[prediction], ...), **fields}
        request = {f"{takes}s": [*request.values()]}
        one = {key: value for key, value in response.items() if key != "model"}
        response = response and {"predictions": [one], "model": response["model"]}
    content: dict[str, Any] = {JSON: {"schema": BODIES[takes, several].model_json_schema(), "example": request}}
    if takes in FILE_TYPES and not several:
        file = {"type": "string", "format": "binary"}
        content |= {kind: {"schema": file} for kind in FILE_TYPES[takes]}
        content[FORM] = {"schema": {"type": "object", "properties": {"file": file}, "required": ["file"]}}
    return _route(create_model(name, __base__=base, __doc__=about, **fields), content, response)


def generate(asked: type[BaseModel], answered: type[BaseModel], example: Example) -> dict[str, Any]:
    """Return arguments of the route for a completion, by an example."""
    request, response = example
    route = _route(answered, {JSON: {"schema": asked.model_json_schema(), "example": request}}, response)
    route["responses"][200]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return route


def _route(model: type[BaseModel], content: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": [PREDICTING],
        "response_model": model,
        "responses": {200: {"content": {JSON: {"example": example} if example else {}}}, **FAILURES},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }
