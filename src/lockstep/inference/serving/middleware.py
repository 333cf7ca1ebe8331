"""What no request gets past: the key, the size of its body, the time that it may take to come."""

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from lockstep.inference.serving.server_metrics import Meters
from lockstep.inference.serving.serving_config import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN = ("/", "/health", "/ready", "/favicon.ico", "/docs", "/openapi.json")
DOCS_FILES = "/static-offline-docs/"
"""Paths that need no key: they tell how to ask."""
HELD_BODIES = 32
"""So many of the largest size, or smaller ones of the same weight, are held at a time; more are answered with 503."""
BUSY = {"retry-after": "1"}
PATIENCE = 4
"""A body this many times as large as allowed is read to its end, and thrown away, so that its sender reads the answer
instead of a connection that was reset."""


class Refused(Exception):
    """A request that is answered before it reaches a route."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}


class ClientDisconnected(Exception):
    """The client has closed its connection."""


@dataclass
class Exchange:
    """A request on its way through the gate."""

    receive: Receive
    respond: Send
    status: int = 0
    """Of the answer, once it has begun."""
    held: int = 0
    """Bytes of its body."""

    async def send(self, message: Message) -> None:
        """Hand on a part of the answer."""
        self.status = message.get("status", self.status)
        await self.respond(message)


class Middleware:
    """An ASGI application around another: reads a request's whole body, within its limits, and counts the answer."""

    def __init__(self, app: App, settings: Settings, meters: Meters, *, paths: frozenset[str]) -> None:
        """`app` may be replaced while it runs; `paths` are those that are counted by name."""
        self.app, self.settings, self.meters, self.paths = app, settings, meters, paths
        self._key = settings.api_key.encode() if settings.api_key else None
        self._held = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, visit = time.monotonic(), Exchange(receive, send)
        try:
            await self._let_through(scope, visit)
        except Refused as refused:
            await _refuse(refused, visit.send)
        except ClientDisconnected:
            return  # nobody is there to be answered
        except asyncio.CancelledError:  # by the server, whose time to drain is over
            if not visit.status:
                await _refuse(Refused(503, "the server has ended", {"connection": "close"}), visit.send)
        finally:
            self._hold(-visit.held, visit)
            if visit.status:
                path = scope["path"] if scope["path"] in self.paths else "other"
                self.meters.answered(path, visit.status, time.monotonic() - began)

    async def _let_through(self, scope: MutableMapping[str, Any], visit: Exchange) -> None:
        headers = dict(scope["headers"])
        self._check_key(scope["path"], headers)
        if scope["method"] == "HEAD":  # as GET, whose body the server leaves out
            scope = {**scope, "method": "GET"}
        body = await self._body(headers, visit)
        gone = asyncio.ensure_future(visit.receive())  # answered when the client goes, or has its answer
        work = asyncio.ensure_future(self.app(scope, _whole(body, gone), visit.send))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not visit.status:
                raise ClientDisconnected
            await work
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in OPEN or path.startswith(DOCS_FILES):
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise Refused(401, "this needs the header Authorization: Bearer KEY", {"www-authenticate": "Bearer"})

    async def _body(self, headers: dict[bytes, bytes], visit: Exchange) -> bytes:
        """All of it; raises Refused, or Gone where the client has gone."""
        told, seconds = headers.get(b"content-length", b"0"), self.settings.timeout_seconds
        if told.isdigit() and int(told) > self.settings.body_bytes * PATIENCE:
            raise self._too_large()
        try:
            async with asyncio.timeout(seconds):
                return await self._read(visit)
        except TimeoutError:
            reason = f"the request did not come whole within {seconds:g} s"
            raise Refused(408, reason, {"connection": "close"}) from None

    async def _read(self, visit: Exchange) -> bytes:
        limit, parts, size = self.settings.body_bytes, list[bytes](), 0
        is_busy = is_last = False
        while not is_last and size <= limit * PATIENCE:
            message = await visit.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part, is_last = message.get("body", b""), not message.get("more_body")
            size += len(part)
            is_busy = is_busy or self._held + len(part) > limit * HELD_BODIES
            if size > limit or is_busy:
                parts.clear()
                self._hold(-visit.held, visit)
            else:
                self._hold(len(part), visit)
                parts.append(part)
        if size > limit:
            raise self._too_large()
        if is_busy:
            raise Refused(503, "too many large requests at once; try again", BUSY)
        return b"".join(parts)

    def _too_large(self) -> Refused:
        return Refused(413, f"a request may have {self.settings.body_bytes:,} bytes", {"connection": "close"})

    def _hold(self, size: int, visit: Exchange) -> None:
        """Count bytes that are kept until their request is answered."""
        self._held += size
        visit.held += size


def _whole(body: bytes, gone: "asyncio.Future[Message]") -> Receive:
    """A body that has come, handed on in one piece, and then the end of the connection."""
    left = [body]

    async def again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await asyncio.shield(gone)

    return again


async def _refuse(refused: Refused, send: Send) -> None:
    body = json.dumps({"error": refused.reason}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
