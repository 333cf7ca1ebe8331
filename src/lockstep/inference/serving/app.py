"""The HTTP application and its routes."""

import asyncio
import html
import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from lockstep.base.errors import LockstepError
from lockstep.base.templates import render
from lockstep.inference.generation.generator import Generator
from lockstep.inference.predictor import Predictor
from lockstep.inference.serving import generation_routes, openai_routes, openapi
from lockstep.inference.serving.batcher import Full
from lockstep.inference.serving.middleware import BUSY, Middleware, is_loopback
from lockstep.inference.serving.request_inputs import (
    BODIES,
    FILE_TYPES,
    FORM,
    JSON,
    InvalidInput,
    media_type_of,
    parsed,
)
from lockstep.inference.serving.service import LARGE, GenerationService, PredictionService, Service, Settings

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin")
"""Headers of proxies, and of pages in a browser, which may come from anywhere."""
ROUTES = ("/predict", "/predict/batch", "/generate", "/v1/chat/completions", "/v1/completions", "/v1/models")
"""Routes that only one kind of model has."""


def build(service: Service) -> Middleware:
    """Return the application behind its middleware; rebuilt for a reloaded model, which OpenAPI describes."""
    app: Any = _application(service)
    paths = frozenset(route.path for route in app.routes)
    middleware = Middleware(app, service.settings, service.metrics, paths=paths)

    def rebuild() -> None:
        middleware.app = _application(service)

    service.model.changed = rebuild
    return middleware


def _application(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    name = html.escape(service.model.current.facts.name)  # FastAPI does not escape it
    title = "Lockstep" if service.settings.api_key else f"Lockstep: {name}"
    handlers = _error_handlers("/generate" if isinstance(service, GenerationService) else "/predict")
    about = openapi.about(service.settings)
    app = FastAPIOffline(title=title, lifespan=lifespan, exception_handlers=handlers, **about)
    if isinstance(service, GenerationService):
        generation_routes.add(app, service)
        openai_routes.add(app, service)
    elif isinstance(service, PredictionService):
        _add_prediction(app, service)
    _add_status(app, service)
    _add_model(app, service)
    return app


def _add_prediction(app: FastAPI, service: PredictionService) -> None:
    takes = service.predictor.takes

    def described(*, several: bool) -> dict[str, Any]:
        return openapi.predict(takes, service.predictor.objective.Answer, several=several, example=service.example)

    @app.post("/predict", **described(several=False))
    async def predict(request: Request) -> JSONResponse:
        """The prediction for one input."""
        (answer,), title = await service.predict(*await inputs_of(request, takes, several=False))
        return JSONResponse({**answer, "model": title})

    @app.post("/predict/batch", **described(several=True))
    async def predict_batch(request: Request) -> JSONResponse:
        """The same for several inputs, in their order."""
        predictions, title = await service.predict(*await inputs_of(request, takes, several=True))
        return JSONResponse({"predictions": predictions, "model": title})


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=[openapi.SERVER])
    async def health() -> dict[str, str]:
        """Whether the process is alive."""
        return {"status": "alive"}

    @app.get("/ready", tags=[openapi.SERVER], responses=openapi.READY)
    async def ready() -> JSONResponse:
        """Whether the model is loaded, has predicted once, and the server is not about to end."""
        if service.is_draining:
            return JSONResponse({"error": "the server is about to end"}, 503)
        model = {} if service.settings.api_key else {"model": service.model.current.facts.title}
        return JSONResponse({"status": "ready", **model})

    @app.get("/metrics", tags=[openapi.SERVER], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Requests, latency, batch sizes and the queue, for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_model(app: FastAPI, service: Service) -> None:
    page_file = "generation_page.html" if isinstance(service, GenerationService) else "page.html"

    @app.get("/info", tags=[openapi.MODEL])
    async def about() -> dict[str, Any]:
        """The model: digest, labels, metrics, recipe; the server's limits."""
        return info(service.model.current, service.settings)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(render(f"inference/serving/{page_file}"))

    @app.post("/-/reload", tags=[openapi.MODEL], responses=openapi.RELOAD)
    async def reload(request: Request) -> JSONResponse:
        """Load the export or run anew, without dropping a request. Only for this machine itself."""
        if not is_local(request):
            return JSONResponse({"error": "this can only be asked from the machine itself"}, 403)
        try:
            before, after = await service.model.reload()
        except LockstepError as error:
            title = service.model.current.facts.title
            return JSONResponse({"error": _encodable(f"{title} is still served: {error}")}, 409)
        return JSONResponse({"before": before, "model": after})


def _error_handlers(answers_at: str) -> dict[type[Exception], Any]:
    """Return what answers each error, with one sentence, in JSON."""

    async def invalid(request: Request, error: InvalidInput) -> Any:
        faults = [{"field": field, "reason": _encodable(reason)} for field, reason in error.faults]
        reason = f"{faults[0]['field']}: {faults[0]['reason']}"
        return _problem(request, reason, error.status, detail=faults, code=error.code)

    async def refused(request: Request, error: HTTPException) -> Any:
        is_other_kind = error.status_code == 404 and request.url.path in ROUTES
        reason = f"this model does not answer here, but to POST {answers_at}" if is_other_kind else str(error.detail)
        return _problem(request, reason, error.status_code, headers=error.headers)

    def answer(reason: str, status: int, headers: dict[str, str] | None = None) -> Any:
        async def answered(request: Request, _: Exception) -> Any:  # a failure's traceback goes to the log
            return _problem(request, reason, status, headers=headers)

        return answered

    return {
        InvalidInput: invalid,
        HTTPException: refused,
        Full: answer("too many requests wait; try again", 503, BUSY),
        TimeoutError: answer("the answer took too long; try again", 504),
        Exception: answer(generation_routes.FAILED, 500),
    }


def _problem(request: Request, reason: str, status: int, **more: Any) -> JSONResponse:
    """Return the response for an error; `more`: the faults as `detail`, `headers`, and the protocol's `code`."""
    headers, code = more.pop("headers", None), more.pop("code", None)
    if request.url.path.startswith(openai_routes.PREFIX):
        field = next((fault["field"] for fault in more.get("detail", [])), None)
        status = 400 if status == 422 else status  # as clients of that protocol expect
        return JSONResponse(openai_routes.problem(reason, status, field=field, code=code), status, headers)
    return JSONResponse({"error": reason, **more}, status, headers)


async def inputs_of(request: Request, takes: str, *, several: bool) -> tuple[list[Any], str]:
    """Return the texts or files of a request, and the field that they are in. Raises InvalidInput."""
    body, media_type, name = await request.body(), media_type_of(request), takes + "s" * several
    if media_type == JSON:
        read = partial(parsed, body, BODIES[takes, several])
        found = getattr(await asyncio.to_thread(read) if len(body) > LARGE else read(), name)
        return found if several else [found], name
    files = (*FILE_TYPES[takes], FORM) if takes in FILE_TYPES and not several else ()
    if media_type not in files:
        raise InvalidInput([("content-type", f"should be {' or '.join((JSON, *files))}")], status=415)
    return ([await _form_file(request)], "file") if media_type == FORM else ([body], "body")


async def _form_file(request: Request) -> bytes:
    """Return the file of a form. Raises InvalidInput."""
    try:
        async with request.form(max_files=1, max_fields=8) as form:
            file = form.get("file")
            if isinstance(file, UploadFile):
                return await file.read()
    except Exception as error:  # whatever the parser raises for a damaged form
        reason = getattr(error, "detail", None) or type(error).__name__
        raise InvalidInput([("body", f"this form cannot be read ({reason})")]) from None
    raise InvalidInput([("file", "the form should have a file in the field 'file'")])


def info(model: Predictor | Generator, settings: Settings) -> dict[str, Any]:
    """Return public facts about the model and the server."""
    limits = {name: value for name, value in asdict(settings).items() if name not in ("api_key", "host", "port")}
    if isinstance(model, Generator):
        limits["context"] = model.context
    return {
        "title": model.facts.title,
        **model.facts.model_dump(mode="json", exclude={"file", "files", "inputs"}),
        "device": str(model.device),
        "limits": limits,
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }


def _encodable(reason: str) -> str:
    """Escape halves of surrogate pairs, which UTF-8 cannot hold."""
    return reason.encode(errors="backslashreplace").decode()


def is_local(request: Request) -> bool:
    """Return whether a request comes from this machine, but neither through a proxy nor from a page in a browser."""
    is_direct = not any(name in request.headers for name in FORWARDED)
    return is_direct and request.client is not None and is_loopback(request.client.host)
