"""Limits that apply to every request: the name of the server, API key, size of the body, time to arrive."""

import asyncio
import hmac
import ipaddress
import re
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from lockstep.inference.serving.service import ServerMetrics, Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN = ("/", "/health", "/ready", "/favicon.ico", "/docs", "/openapi.json")
DOCS_FILES = "/static-offline-docs/"
"""Paths that need no key: they describe the server."""
MAX_BODIES = 32
"""Number of bodies of the largest size, or total of smaller ones, held at a time; others are answered with 503."""
BUSY = {"retry-after": "1"}
DISCARDED_FACTOR = 4
"""A body up to this many times too large is read and discarded: the client gets a response, not a reset."""


@dataclass
class Exchange:
    """One request and its response."""

    receive: Receive
    respond: Send
    status: int = 0
    """Status of the response, once it has started."""
    held: int = 0
    """Number of bytes of its body in memory."""

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        await self.respond(message)


class Middleware:
    """An ASGI middleware: reads a request's whole body, within its limits, and counts the response."""

    def __init__(self, app: App, settings: Settings, metrics: ServerMetrics, *, paths: frozenset[str]) -> None:
        """`app` may be replaced while it runs; `paths` are counted by name."""
        self.app, self.settings, self.metrics, self.paths = app, settings, metrics, paths
        self._key = settings.api_key.encode() if settings.api_key else None
        self._names = {"localhost", "127.0.0.1", "::1", settings.host.lower()} if is_loopback(settings.host) else None
        self._held = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, exchange = time.monotonic(), Exchange(receive, send)
        try:
            await self._forward(scope, exchange)
        except HTTPException as refusal:  # the application has answered its own
            await _refuse(refusal, exchange)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # by the server, at the end of drain_seconds
            if not exchange.status:
                await _refuse(HTTPException(503, "the server has ended", {"connection": "close"}), exchange)
        finally:
            self._hold(-exchange.held, exchange)
            if exchange.status:
                path = scope["path"] if scope["path"] in self.paths else "other"
                self.metrics.record_response(path, exchange.status, time.monotonic() - began)

    async def _forward(self, scope: MutableMapping[str, Any], exchange: Exchange) -> None:
        headers = dict(scope["headers"])
        self._check_site(headers)
        self._check_key(scope["path"], headers)
        if scope["method"] == "HEAD":  # as GET: the server leaves the body out
            scope = {**scope, "method": "GET"}
        body = await self._body(headers, exchange)
        disconnected = asyncio.ensure_future(exchange.receive())  # done after the response, too
        work = asyncio.ensure_future(self.app(scope, _replay(body, disconnected), exchange.send))
        try:
            await asyncio.wait((work, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not exchange.status:
                raise ClientDisconnect
            await work
        finally:
            disconnected.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))

    def _check_site(self, headers: dict[bytes, bytes]) -> None:
        """Raise HTTPException for a request of another site's page in a browser on this machine; such a site's name may
        also resolve to this machine."""
        if self._names is None:
            return
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        if host and re.sub(r":\d*$", "", host).strip("[]").lower() not in self._names:
            raise HTTPException(421, f"this server is {', '.join(sorted(self._names))}: ask it by one of these names")
        if origin and origin.partition("://")[2] != host and headers.get(b"sec-fetch-site") != b"same-origin":
            raise HTTPException(403, "this server does not answer pages of other sites")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in OPEN or path.startswith(DOCS_FILES):
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise HTTPException(401, "this needs the header Authorization: Bearer KEY", {"www-authenticate": "Bearer"})

    async def _body(self, headers: dict[bytes, bytes], exchange: Exchange) -> bytes:
        """Return the whole body. Raises HTTPException, or ClientDisconnect."""
        length, seconds = headers.get(b"content-length", b"0"), self.settings.timeout_seconds
        if length.isdigit() and int(length) > self.settings.body_bytes * DISCARDED_FACTOR:
            raise self._too_large()
        try:
            async with asyncio.timeout(seconds):
                return await self._read(exchange)
        except TimeoutError:
            reason = f"the request did not come whole within {seconds:g} s"
            raise HTTPException(408, reason, {"connection": "close"}) from None

    async def _read(self, exchange: Exchange) -> bytes:
        limit, pieces, size = self.settings.body_bytes, list[bytes](), 0
        is_busy = is_last = False
        while not is_last and size <= limit * DISCARDED_FACTOR:
            message = await exchange.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece, is_last = message.get("body", b""), not message.get("more_body")
            size += len(piece)
            is_busy = is_busy or self._held + len(piece) > limit * MAX_BODIES
            if size > limit or is_busy:
                pieces.clear()
                self._hold(-exchange.held, exchange)
            else:
                self._hold(len(piece), exchange)
                pieces.append(piece)
        if size > limit:
            raise self._too_large()
        if is_busy:
            raise HTTPException(503, "too many large requests at once; try again", BUSY)
        return b"".join(pieces)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"a request may have {self.settings.body_bytes:,} bytes", {"connection": "close"})

    def _hold(self, size: int, exchange: Exchange) -> None:
        """Count bytes that are in memory until their request is answered."""
        self._held += size
        exchange.held += size


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address, or the address of a name."""
    try:
        address = ipaddress.ip_address(host if ":" in host else socket.gethostbyname(host))
    except (ValueError, OSError):
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _replay(body: bytes, disconnected: "asyncio.Future[Message]") -> Receive:
    """Return an ASGI receive function: the body in one message, then the end of the connection."""
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await asyncio.shield(disconnected)

    return receive


async def _refuse(refusal: HTTPException, exchange: Exchange) -> None:
    response = JSONResponse({"error": refusal.detail}, refusal.status_code, refusal.headers)
    await response({"type": "http"}, exchange.receive, exchange.send)
