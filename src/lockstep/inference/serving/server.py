"""Runs the application: opens the port, handles signals, drains."""

import asyncio
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from lockstep.base.errors import LaunchError, LockstepError
from lockstep.inference.generation.generator import Generator
from lockstep.inference.predictor import Predictor
from lockstep.inference.serving import app, openapi
from lockstep.inference.serving.connection import Connection
from lockstep.inference.serving.service import ServedModel, Service, Settings, StillLoading, service_of

BACKLOG = 2048
LOADING_SECONDS = 600.0
"""Time for a model to load and predict, or 20 times the time limit of a request if that is longer."""


def serve(load: Callable[[], Predictor | Generator], settings: Settings, report: Callable[[str], None]) -> None:
    """Serve the model that `load` returns until SIGTERM or SIGINT, then answer what has been accepted. SIGHUP reloads
    it. Raises LaunchError if the port is unavailable, and the errors of `load`."""
    if settings.api_key is not None and settings.api_key.strip() != (settings.api_key or None):
        raise LaunchError(
            "the API key is empty, or begins or ends with a space, which a header cannot carry: give another, or leave "
            "--api-key out to let everybody ask"
        )
    with listening(settings) as opened:
        model = _load(load, settings, report)
        service = service_of(model, settings)
        try:
            with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
                runner.run(_serve(service, opened, report=report))
        finally:
            service.close()  # if the application could not


def _load(load: Callable[[], Predictor | Generator], settings: Settings, report: Callable[[str], None]) -> ServedModel:
    try:
        return ServedModel(load, seconds=max(LOADING_SECONDS, 20 * settings.timeout_seconds))
    except (KeyboardInterrupt, StillLoading) as error:
        report(str(error) or "interrupted")
        os._exit(getattr(error, "exit_code", 130))  # the thread that loads may not let the interpreter end


@contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """Yield the socket, opened before the model is loaded, which takes longer. Raises LaunchError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as opened:
        if os.name == "posix":  # on Windows it would let two servers share a port
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((settings.host, settings.port))
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error}): choose another --port, "
                "or --port 0 for any that is free"
            ) from None
        opened.listen(BACKLOG)
        yield opened


async def _serve(service: Service, opened: socket.socket, *, report: Callable[[str], None]) -> None:
    protocol: Any = partial(Connection, seconds=service.settings.timeout_seconds)
    config = uvicorn.Config(
        app.build(service),
        http=protocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(service.settings.drain_seconds),
        server_header=False,
        headers=[*openapi.HEADERS.items()],
        ws="none",
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]  # else it re-raises signals at its end
    handle_signals(server, service, report)
    host, port = opened.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    report(f"serving {service.model.current.facts.title} on http://{address} (Ctrl-C ends it)")
    await server.serve([opened])


def handle_signals(server: Any, service: Service, report: Callable[[str], None]) -> None:
    """Drain after SIGINT or SIGTERM, and end at once after the second; load the model again after SIGHUP."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        if service.is_draining:
            server.force_exit = True
            return
        service.is_draining = server.should_exit = True
        report(f"ending: answering what has come, for at most {service.settings.drain_seconds:g} s")

    async def reload() -> None:
        try:
            before, after = await service.model.reload()
            report(f"loaded {after} in place of {before}")
        except LockstepError as error:
            report(f"{service.model.current.facts.title} is still served: {error}")

    # the task of a reload is held by that of the model, which it awaits
    handlers = {"SIGINT": end, "SIGTERM": end, "SIGHUP": lambda: loop.create_task(reload())}
    for name, handler in handlers.items():  # not by `loop.add_signal_handler`: Windows lacks it, and SIGHUP
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_, each=handler: loop.call_soon_threadsafe(each))
