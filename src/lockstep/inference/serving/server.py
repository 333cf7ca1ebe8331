"""Runs the application: takes its port, answers signals, drains."""

import asyncio
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lockstep.base import plugins
from lockstep.base.errors import LaunchError, LockstepError
from lockstep.inference.predictor import Predictor
from lockstep.inference.serving import app
from lockstep.inference.serving.service import ServedModel, Service
from lockstep.inference.serving.serving_config import Settings

BACKLOG = 2048
PACKAGES = ("fastapi", "fastapi_offline", "python_multipart", "prometheus_client", "uvicorn")
"""Of the extra `serve`."""


def serve(load: Callable[[], Predictor], settings: Settings, say: Callable[[str], None]) -> None:
    """Serve what `load` gives until SIGTERM or SIGINT, then answer what has been accepted.

    SIGHUP loads it anew. Raises LaunchError where the port cannot be had, MissingExtra without the packages for it, and
    what `load` raises.
    """
    plugins.require("serve", *PACKAGES, what="lockstep serve")
    if settings.api_key is not None and settings.api_key.strip() != (settings.api_key or None):
        raise LaunchError(
            "the API key is empty, or begins or ends with a space, which a header cannot carry: give another, or leave "
            "--api-key out to let everybody ask"
        )
    with listening(settings) as opened:
        model = _loaded(load, say)
        service = Service(model, settings)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(_serve(service, opened, say=say))
        finally:
            service.batcher.close()  # where the application had no time for it


def _loaded(load: Callable[[], Predictor], say: Callable[[str], None]) -> ServedModel:
    try:
        return ServedModel(load)
    except KeyboardInterrupt:
        say("interrupted")
        os._exit(130)  # else the interpreter would wait for the thread that loads


@contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """The socket: taken before the model is loaded, which takes longer. Raises LaunchError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as opened:
        if os.name == "posix":  # elsewhere it would let two listen on one port
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
    except ImportError:  # Windows, where it does not exist
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(service: Service, opened: socket.socket, *, say: Callable[[str], None]) -> None:
    import uvicorn

    config = uvicorn.Config(
        app.build(service),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(service.settings.drain_seconds),
        server_header=False,
        ws="none",
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]  # or it ends this process by them
    Signals(server, service, say).listen()
    host, port = opened.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    say(f"serving {service.model.current.facts.title} on http://{place} (Ctrl-C ends it)")
    await server.serve([opened])


class Signals:
    """What they make a running server do."""

    def __init__(self, server: Any, service: Service, say: Callable[[str], None]) -> None:
        self.server, self.service, self.say = server, service, say
        self.loop = asyncio.get_running_loop()
        self._reloads: set[asyncio.Task[None]] = set()

    def listen(self) -> None:
        """Answer them from now on, in the event loop; Windows has no SIGHUP, and its loops take no signals."""
        answers = {"SIGINT": self.end, "SIGTERM": self.end, "SIGHUP": self.reload}
        for name, answer in answers.items():
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_, answer=answer: self.loop.call_soon_threadsafe(answer))

    def end(self) -> None:
        """Take nothing more, answer what has come; the second time, end at once."""
        if self.service.is_draining:
            self.server.force_exit = True
            return
        self.service.is_draining = self.server.should_exit = True
        self.say(f"ending: answering what has come, for at most {self.service.settings.drain_seconds:g} s")

    def reload(self) -> None:
        """Load the model anew, beside the one that is served."""
        task = self.loop.create_task(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        try:
            before, after = await self.service.model.reload()
            self.say(f"loaded {after} in place of {before}")
        except LockstepError as error:
            self.say(f"{self.service.model.current.facts.title} is still served: {error}")
