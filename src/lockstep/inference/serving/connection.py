"""A client's connection, with limits that uvicorn lacks: on incomplete requests, and on answers that are not read."""

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEADER_BYTES = 64 << 10
"""Maximum size of a request's line and headers, of the header of a body's chunk, and of trailers."""
MOST_SECONDS = 10.0
"""Time limit for the headers to arrive, or for the client to read some of an answer."""
MOST_WAITING = 512
"""Maximum number of connections without a complete request; a further one closes the one that waits longest."""
MOST_PIPELINED = 8
"""Maximum number of requests that wait for the answer to an earlier one of their connection."""


class Connection(HttpToolsProtocol):
    """A connection as uvicorn's, with the limits."""

    unparsed = 0
    """Number of bytes since the last complete part of a request."""
    since = 0.0
    """Time at which it began to wait for a request."""
    timer: asyncio.TimerHandle | None = None
    active: Any = None
    """Current or last request."""

    def __init__(self, *, seconds: float, **given: Any) -> None:
        """Set the time limit: `seconds`, at most MOST_SECONDS."""
        super().__init__(**given)
        self.seconds = min(seconds, MOST_SECONDS)

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.active is None or self.active.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        others: Any = self.connections  # of this class
        if len(others) > MOST_WAITING:
            incomplete = [each for each in others if each.is_waiting or each.cycle.more_body]
            if len(incomplete) > MOST_WAITING:
                min(incomplete, key=lambda each: each.since).drop()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timer:
            self.timer.cancel()
        if self.active:  # uvicorn notifies only the newest
            self.active.disconnected = True
            self.active.message_event.set()

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            size = MOST_HEADER_BYTES - self.unparsed
            piece, data = data[:size], data[size:]
            self.unparsed += len(piece)
            super().data_received(piece)
            if self.unparsed == MOST_HEADER_BYTES:
                self.send_400_response(f"what is no body may take {MOST_HEADER_BYTES:,} bytes", 431)
            elif len(self.pipeline) > MOST_PIPELINED:
                self.drop()

    def on_headers_complete(self) -> None:
        self.unparsed = 0
        super().on_headers_complete()
        self._watch()

    def on_chunk_header(self) -> None:
        self.unparsed = 0

    def on_body(self, body: bytes) -> None:
        self.unparsed = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.active = cycle
        super()._start_asgi_task(cycle, app)

    def drop(self) -> None:
        """Close the connection without sending anything."""
        if self.active:
            self.active.disconnected = True  # now: nothing may be written to a closed transport
        self.transport.abort()

    def _watch(self) -> None:
        """Start the time limit, if the server waits for the client."""
        if self.timer:
            self.timer.cancel()
        if self.is_waiting or self.flow.write_paused:
            self.timer = self.loop.call_later(self.seconds, self._end)

    def _end(self) -> None:
        if self.unparsed:
            self.send_400_response("the headers of the request did not come whole in time", 408)
        elif self.transport.get_write_buffer_size():  # closing would wait until it is read
            self.drop()
        else:
            self.transport.close()

    def send_400_response(self, msg: str, status: int = 400) -> None:
        """Answer an invalid request, and close the connection."""
        if not self.is_waiting or self.transport.get_write_buffer_size():  # in the middle of another answer
            self.drop()
            return
        body = json.dumps({"error": msg})
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        self.transport.close()
