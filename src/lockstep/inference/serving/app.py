"""The routes: predict, and what tells how the server is."""

import asyncio
import html
import ipaddress
import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.base.errors import LockstepError
from lockstep.inference.predictor import Predictor
from lockstep.inference.serving import openapi
from lockstep.inference.serving.batcher import Full
from lockstep.inference.serving.middleware import BUSY, Middleware
from lockstep.inference.serving.request_inputs import FORM, IMAGE_TYPES, JSON, InvalidInput, json_inputs
from lockstep.inference.serving.service import LARGE, Service, answer
from lockstep.inference.serving.serving_config import Settings

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin")
"""Headers of proxies, and of a page in a browser, which may be anybody's."""
PAGE = Path(__file__).with_name("page.html")


def build(service: Service) -> Middleware:
    """The application, behind its gate; a newer model gets one that tells of it."""
    app = _application(service)
    paths = frozenset(route.path for route in app.routes)
    gate = Middleware(app, service.settings, service.meters, paths=paths)

    def renew() -> None:
        gate.app = _application(service)

    service.model.changed = renew
    return gate


def _application(service: Service) -> Any:
    from fastapi_offline import FastAPIOffline

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.batcher.close)

    title = f"Lockstep: {html.escape(service.model.current.facts.name)}"  # FastAPI puts it into a page as it is
    app = FastAPIOffline(title=title, lifespan=lifespan, **openapi.about(service.settings))
    _predicting(app, service)
    _telling(app, service)
    _reloading(app, service)
    _explaining(app)
    return app


def _predicting(app: Any, service: Service) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    takes = service.takes
    asked, answered = service.model.example

    @app.post("/predict", **openapi.predict(takes, asked, answered))  # type: ignore[untyped-decorator]
    async def predict(request: Request) -> JSONResponse:
        """The label of one input, how sure the model is of it, and the probability of every label."""
        predictor, found = await service.predict(*await inputs_of(request, takes, several=False))
        return JSONResponse({**answer(predictor, found[0]), "model": predictor.facts.title})

    @app.post("/predict/batch", **openapi.predict_batch(takes, asked, answered))  # type: ignore[untyped-decorator]
    async def predict_batch(request: Request) -> JSONResponse:
        """The same for several inputs, in their order."""
        predictor, found = await service.predict(*await inputs_of(request, takes, several=True))
        predictions = [answer(predictor, row) for row in found]
        return JSONResponse({"predictions": predictions, "model": predictor.facts.title})


def _telling(app: Any, service: Service) -> None:
    from fastapi import Response
    from fastapi.responses import HTMLResponse, JSONResponse

    @app.get("/health", **openapi.HEALTH)  # type: ignore[untyped-decorator]
    async def health() -> dict[str, str]:
        """Whether the process is alive."""
        return {"status": "alive"}

    @app.get("/ready", **openapi.READY)  # type: ignore[untyped-decorator]
    async def ready() -> JSONResponse:
        """Whether the model is loaded, has predicted once, and the server is not about to end."""
        if service.is_draining:
            return JSONResponse({"error": "the server is about to end"}, 503)
        return JSONResponse({"status": "ready", "model": service.model.current.facts.title})

    @app.get("/metrics", **openapi.METRICS)  # type: ignore[untyped-decorator]
    async def metrics() -> Response:
        """Requests, latency, batch sizes and the queue, for Prometheus."""
        text, form = service.meters.text()
        return Response(text, media_type=form)

    @app.get("/info", **openapi.INFO)  # type: ignore[untyped-decorator]
    async def about() -> dict[str, Any]:
        """The model: digest, labels, metrics, recipe; the server's limits."""
        return info(service.model.current, service.settings)

    @app.get("/", include_in_schema=False)  # type: ignore[untyped-decorator]
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=openapi.PAGE_HEADERS)


def _reloading(app: Any, service: Service) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    @app.post("/-/reload", **openapi.RELOAD)  # type: ignore[untyped-decorator]
    async def reload(request: Request) -> JSONResponse:
        """Load the export or run anew, without dropping a request. Only for this machine itself."""
        if not is_from_here(request):
            return JSONResponse({"error": "this can only be asked from the machine itself"}, 403)
        try:
            before, after = await service.model.reload()
        except LockstepError as error:
            title = service.model.current.facts.title
            return JSONResponse({"error": printable(f"{title} is still served: {error}")}, 409)
        return JSONResponse({"before": before, "model": after})


def _explaining(app: Any) -> None:
    """Every error is one sentence, in JSON."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    async def wrong(_: Request, error: InvalidInput) -> JSONResponse:
        faults = [{"field": field, "reason": printable(reason)} for field, reason in error.faults]
        first = faults[0]
        return JSONResponse({"error": f"{first['field']}: {first['reason']}", "detail": faults}, error.status)

    async def full(_: Request, __: Full) -> JSONResponse:
        return JSONResponse({"error": "too many requests wait; try again"}, 503, BUSY)

    async def late(_: Request, __: TimeoutError) -> JSONResponse:
        return JSONResponse({"error": "the answer took too long; try again"}, 504)

    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    async def failed(_: Request, __: Exception) -> JSONResponse:  # and the traceback goes to the log
        return JSONResponse({"error": "the model failed on this; the server's log says how"}, 500)

    handlers = {InvalidInput: wrong, Full: full, TimeoutError: late, HTTPException: refused, Exception: failed}
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


async def inputs_of(request: Any, takes: str, *, several: bool) -> tuple[list[Any], str]:
    """The texts or images of a request, and the field that they are in; raises Wrong."""
    body, kind = await request.body(), request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind == JSON:
        read = partial(json_inputs, body, takes, several=several)
        return await asyncio.to_thread(read) if len(body) > LARGE else read(), takes + "s" * several
    files = (*IMAGE_TYPES, FORM) if takes == "image" and not several else ()
    if kind not in files:
        raise InvalidInput([("content-type", f"should be {' or '.join((JSON, *files))}")], status=415)
    return ([await _uploaded(request)], "file") if kind == FORM else ([body], "body")


async def _uploaded(request: Any) -> bytes:
    """The file of a form; raises Wrong."""
    from starlette.datastructures import UploadFile

    try:
        async with request.form(max_files=1, max_fields=8) as form:
            file = form.get("file")
            if isinstance(file, UploadFile):
                return await file.read()
    except Exception as error:  # whatever its parser meets in a damaged form
        reason = getattr(error, "detail", None) or type(error).__name__
        raise InvalidInput([("body", f"this form cannot be read ({reason})")]) from None
    raise InvalidInput([("file", "the form should have an image file in the field 'file'")])


def info(predictor: Predictor, settings: Settings) -> dict[str, Any]:
    """What there is to know of the model and the server; nothing secret."""
    limits = asdict(settings)
    for name in ("api_key", "host", "port"):
        del limits[name]
    return {
        "title": predictor.facts.title,
        **predictor.facts.model_dump(mode="json", exclude={"file", "files", "inputs"}),
        "device": str(predictor.device),
        "limits": limits,
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }


def printable(reason: str) -> str:
    """Without halves of characters, which JSON could not be sent with."""
    return reason.encode(errors="backslashreplace").decode()


def is_from_here(request: Any) -> bool:
    """Whether a request comes from this machine, and not through a proxy on it, or from a page in its browser."""
    if request.client is None or any(name in request.headers for name in FORWARDED):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return False
