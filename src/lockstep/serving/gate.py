"""What no request gets past: the key, the size of its body, the time that it may take to come."""

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lockstep.serving.meters import Meters
from lockstep.serving.settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN = ("/", "/health", "/ready", "/favicon.ico")
"""Paths that need no key."""
PATIENCE = 4
"""A body this many times as large as allowed is read to its end, and thrown away, so that its sender reads the answer
instead of a connection that was reset."""


class Refused(Exception):
    """A request that is answered before it reaches a route."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}


class Gone(Exception):
    """The client has closed its connection."""


class Gate:
    """An ASGI application around another: reads a request's whole body, within its limits, and counts the answer."""

    def __init__(self, app: App, settings: Settings, meters: Meters) -> None:
        self.app, self.settings, self.meters = app, settings, meters
        self._key = settings.api_key.encode() if settings.api_key else None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check_key(scope["path"], headers)
            body = await self._body(headers, receive)
            await self.app(scope, _whole(body, receive), counted)
        except Refused as refused:
            await _refuse(refused, counted)
        except Gone:
            return  # nobody is there to be answered
        except asyncio.CancelledError:  # by the server, whose time to drain is over
            if not status:
                await _refuse(Refused(503, "the server has ended", {"connection": "close"}), counted)
        finally:
            if status:
                self._count(scope, status, time.monotonic() - began)

    def _count(self, scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")  # as it was declared: a path that is not there must not make a series
        self.meters.answered(path, status, seconds)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in OPEN:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise Refused(401, "this needs the header Authorization: Bearer KEY", {"www-authenticate": "Bearer"})

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """All of it; raises Refused, or Gone where the client has gone."""
        limit, seconds = self.settings.body_bytes, self.settings.timeout_seconds
        large = Refused(413, f"a request may have {limit:,} bytes", {"connection": "close"})
        told = headers.get(b"content-length", b"0")
        if told.isdigit() and int(told) > limit * PATIENCE:
            raise large
        parts, size = [], 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                    is_last = not message.get("more_body")
                    if size > limit and (is_last or size > limit * PATIENCE):
                        raise large
                    if is_last:
                        return b"".join(parts)
        except TimeoutError:
            reason = f"the request did not come whole within {seconds:g} s"
            raise Refused(408, reason, {"connection": "close"}) from None


def _whole(body: bytes, receive: Receive) -> Receive:
    """A body that has come, handed on in one piece."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _refuse(refused: Refused, send: Send) -> None:
    body = json.dumps({"error": refused.reason}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
