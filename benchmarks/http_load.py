"""A client for load: many connections, each asking one text after the other, with next to no cost of its own."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Seen:
    """What came back."""

    seconds: list[float] = field(default_factory=list)
    """Of each request."""
    wall: float = 0.0


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    """One request on an open connection -> status and body."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head[9:12])
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return status, await reader.readexactly(length)


def request_of(text: str, path: str = "/predict") -> bytes:
    """POST {"text": ...}."""
    body = json.dumps({"text": text}).encode()
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        path.encode(),
        len(body),
        body,
    )


async def _connection(port: int, texts: Sequence[str], end: float, *, seen: Seen) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (began := time.perf_counter()) < end:
        text = random.choice(texts)
        status, body = await ask(reader, writer, request_of(text))
        seen.seconds.append(time.perf_counter() - began)
        assert status == 200, (status, body)
    writer.close()
    await writer.wait_closed()


async def _all(port: int, texts: Sequence[str], *, connections: int, seconds: float) -> Seen:
    seen, began = Seen(), time.perf_counter()
    end = began + seconds
    await asyncio.gather(*(_connection(port, texts, end, seen=seen) for _ in range(connections)))
    seen.wall = time.perf_counter() - began
    return seen


def load(port: int, texts: Sequence[str], *, connections: int, seconds: float) -> Seen:
    """Ask for so long, over so many connections at once; every answer has to be a 200."""
    return asyncio.run(_all(port, texts, connections=connections, seconds=seconds))
