"""Runs the application: takes its port, answers signals, drains."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lockstep.errors import LaunchError, LockstepError
from lockstep.inference.predictor import Predictor
from lockstep.serving import app
from lockstep.serving.service import Model, Service
from lockstep.serving.settings import Settings

BACKLOG = 2048


def serve(load: Callable[[], Predictor], settings: Settings, say: Callable[[str], None]) -> None:
    """Serve what `load` gives until SIGTERM or SIGINT, then answer what has been accepted.

    SIGHUP loads it anew. Raises LaunchError where the port cannot be had, and what `load` raises.
    """
    with listening(settings) as opened:
        model = Model(load)
        service = Service(model, settings)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(service, opened, say=say))


@contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """The socket: taken before the model is loaded, which takes longer. Raises LaunchError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as opened:
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


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(service: Service, opened: socket.socket, *, say: Callable[[str], None]) -> None:
    import uvicorn

    settings, model = service.settings, service.model
    config = uvicorn.Config(
        app.build(service),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=round(settings.drain_seconds),
        server_header=False,
        ws="none",
    )
    server = uvicorn.Server(config)
    server.capture_signals = _untouched  # type: ignore[method-assign]  # it would end this process by the signal again
    loop, tasks = asyncio.get_running_loop(), set()

    def end() -> None:
        if service.is_draining:
            server.force_exit = True
        service.is_draining = server.should_exit = True
        say(f"ending: answering what has come, for at most {settings.drain_seconds:g} s")

    async def reload() -> None:
        try:
            before, after = await model.reload()
            say(f"loaded {after} in place of {before}")
        except LockstepError as error:
            say(f"{model.current.facts.title} is still served: {error}")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, lambda: tasks.add(loop.create_task(reload())))
    host, port = opened.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    say(f"serving {model.current.facts.title} on http://{place} ({torch.get_num_threads()} threads; Ctrl-C ends it)")
    await server.serve([opened])


@contextmanager
def _untouched() -> Iterator[None]:
    yield
