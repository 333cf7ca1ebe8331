"""A connection to another process's StoreServer, which torch.distributed takes for any other store."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store

from lockstep.protocol.store_server import (
    ADMISSION_SECONDS,
    LARGEST,
    LARGEST_FIRST,
    LOST,
    STRANGE,
    limit_waiting,
    shut_down,
)

MARGIN_SECONDS = 60.0
"""How much longer than a request may take there its answer may take."""
LONGEST_SECONDS = 1e6
"""Longest timeout that poll() takes."""


class StoreClient(Store):
    """Methods raise DistNetworkError where the server is lost, DistStoreError after the timeout."""

    def __init__(self, host: str, port: int, *, timeout: timedelta, connect_seconds: float = ADMISSION_SECONDS) -> None:
        """Connect; `prove` has to follow. Raises OSError."""
        super().__init__()
        self.host, self.port = host, port
        self.set_timeout(timeout)
        self.greeting: dict[str, str] = {}
        self._secret = b""
        self._clones: list[StoreClient] = []
        """Clones, referenced here since C++ holds a clone but not its Python object."""
        self._busy = threading.Lock()
        sock = socket.create_connection((host, port), timeout=connect_seconds)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(sock.detach())

    def read_greeting(self, *, seconds: float = ADMISSION_SECONDS) -> None:
        """Read the server's greeting, which is public, waiting for it so long. Raises DistError."""
        with self._handshake():
            limit_waiting(self._connection, ADMISSION_SECONDS)
            if not self._connection.poll(seconds):
                raise DistStoreError(f"{self.host}:{self.port} says nothing")
            greeting = json.loads(self._connection.recv_bytes(LARGEST_FIRST))
            self.greeting = {key: str(value) for key, value in greeting.items()}

    def reject(self, *, text: str, code: str) -> None:
        """Report, instead of `prove`, why this process cannot join. Raises DistNetworkError."""
        with self._handshake():
            self._connection.send_bytes(json.dumps({"text": text, "code": code}).encode())
        self.close()

    def close(self) -> None:
        self._connection.close()

    def shut_down(self) -> None:
        """Wake a thread that waits for an answer: to it, the server is lost."""
        shut_down(self._connection)

    def prove(self, secret: bytes) -> "StoreClient":
        """Prove to know the secret, and check that the server does, after the greeting. Raises DistNetworkError."""
        with self._handshake():
            self._connection.send_bytes(b"null")
            answer_challenge(self._connection, secret)
            deliver_challenge(self._connection, secret)
            limit_waiting(self._connection, 0)
        self._secret = secret
        return self

    @contextmanager
    def _handshake(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError:
            self.close()
            raise DistNetworkError(f"{self.host}:{self.port} does not know the run's secret, or has another") from None
        except STRANGE as error:
            self.close()
            raise DistNetworkError(f"{self.host}:{self.port} does not answer as a store ({error!r})") from None

    def _ask(self, *request: Any, seconds: float) -> Any:
        with self._busy:
            try:
                self._connection.send_bytes(json.dumps(request).encode())
                if not self._connection.poll(min(seconds + MARGIN_SECONDS, LONGEST_SECONDS)):
                    raise TimeoutError
                is_done, result = json.loads(self._connection.recv_bytes(LARGEST))
            except LOST as error:
                self.close()
                raise DistNetworkError(f"the store at {self.host}:{self.port} is lost ({error!r})") from None
            except BaseException:
                self.close()  # a later request would read the answer of this one
                raise
        if not is_done:
            raise DistStoreError(result)
        return result

    @property
    def _seconds(self) -> float:
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        return limit.total_seconds()

    # ---- what torch.distributed calls, and Lockstep's own notes

    def clone(self) -> "StoreClient":
        """Return a client with a connection of its own."""
        copy = connected(self.host, self.port, self._secret, timeout=timedelta(seconds=self._seconds))
        self._clones.append(copy)
        return copy

    def set(self, key: str, value: str | bytes) -> None:
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("set", key, encoded.decode("latin-1"), seconds=self._seconds)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self._ask("get", list(keys), self._seconds, seconds=self._seconds)
        return [text.encode("latin-1") for text in found]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount, seconds=self._seconds))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys), seconds=self._seconds))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = timeout.total_seconds() if timeout else self._seconds
        self._ask("wait", list(keys), seconds, seconds=seconds)


def connected(host: str, port: int, secret: bytes, *, timeout: timedelta) -> StoreClient:
    """Connect, and prove to know the secret. Raises DistError."""
    try:
        client = StoreClient(host, port, timeout=timeout)
    except OSError as error:
        raise DistNetworkError(f"cannot connect to {host}:{port} ({error.strerror or error})") from None
    client.read_greeting()
    return client.prove(secret)
