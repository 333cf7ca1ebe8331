"""A key-value store that this process serves to those that know the run's secret.

It stands in for the server of torch's TCPStore, which has no authentication. A client gets a public greeting, then both
sides prove with HMAC challenges (multiprocessing.connection) that they know the secret; all that follows is JSON. A
thread for each client, so that none delays another.
"""

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from torch.distributed import DistStoreError, Store

ADMISSION_SECONDS = 5.0
"""How long a client may take for each of its first messages."""
MOST_STRANGERS = 256
"""Limit of clients at a time that have not proved to know the secret; more are turned away."""
STRANGER_SECONDS = 30.0
"""Longest time that a client may be one of them, where others come."""
LARGEST_FIRST, LARGEST = 8192, 2**26
"""Bytes of a message of a client before it is admitted, and afterwards."""
PAUSE_SECONDS = 0.05
"""Pause before another connection is accepted, after one could not be."""
WATCH_SECONDS = 1.0
"""Pause between two checks whether a waiting client is still connected."""
LOST = (OSError, EOFError)
"""Errors that the loss of the other side leads to."""
SILENT = (EOFError, ConnectionError, BlockingIOError)
"""Errors of clients that only probe the port, or were killed before they could prove to know the secret."""
STRANGE = (*LOST, ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError, AuthenticationError)
"""Errors of clients that do not belong to the run."""


def limit_waiting(connection: Connection, seconds: float) -> None:
    """Limit the time of each read and write; 0: no limit."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=connection.fileno()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.detach()


def shut_down(connection: Connection) -> None:
    """Shut a connection down, which wakes a thread that waits for the other side."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


class StoreServer(Store):
    """The store, for this process itself; `port` is where others connect. They wait until it is opened to them."""

    def __init__(self, listener: socket.socket, timeout: timedelta) -> None:
        """`listener`: socket bound to the address to serve. `timeout`: of get and wait."""
        super().__init__()
        self.port: int = listener.getsockname()[1]
        self.refused = 0
        """Number of clients that did not prove to know the secret, or came when too many others did."""
        self.rejection: dict[str, str] | None = None
        """Reason why a node cannot join the run, as it reported before it was admitted."""
        self._listener, self._timeout = listener, timeout
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._strangers: dict[Connection, float] = {}
        """Clients that are not admitted yet -> time of their connection."""
        self._secret: bytes | None = None
        self._greeting: dict[str, str] = {}
        self._is_closed = False
        threading.Thread(target=self._accept, name="store", daemon=True).start()

    def open_to(self, secret: bytes, greeting: dict[str, str] | None = None) -> "StoreServer":
        """Admit clients that know the secret, after a public greeting."""
        with self._changed:
            self._secret, self._greeting = secret, greeting or {}
            self._changed.notify_all()
        return self

    def close(self) -> None:
        """Admit no further clients; those that are connected stay so until this process ends."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self.refused:
            sys.stderr.write(
                f"{self.refused} connections to port {self.port} were refused: they did not know the run's secret\n"
            )

    # ---- the store

    def set(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, (timeout or self._timeout).total_seconds(), client=None)

    def _wait(self, keys: Sequence[str], seconds: float, *, client: Connection | None) -> None:
        """Wait for keys. Raises DistStoreError after the timeout, EOFError when the client is lost meanwhile."""
        end = time.monotonic() + seconds
        with self._changed:
            while not self.check(keys):
                left = end - time.monotonic()
                if left <= 0:
                    raise DistStoreError(f"wait timeout after {seconds:.0f} s, keys: {', '.join(keys)}")
                self._changed.wait(min(left, WATCH_SECONDS))
                if client is not None and client.poll(0):  # a waiting client sends nothing: it is gone
                    raise EOFError

    # ---- clients

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # such as too many open files
                time.sleep(PAUSE_SECONDS)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection = Connection(sock.detach())
            for other, since in list(self._strangers.items()):
                if time.monotonic() - since > STRANGER_SECONDS:
                    shut_down(other)
            if len(self._strangers) >= MOST_STRANGERS:
                self.refused += 1
                connection.close()
                continue
            self._strangers[connection] = time.monotonic()
            threading.Thread(target=self._serve, args=(connection,), name="store client", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(*LOST):
            if not self._is_admitted(connection):
                return
            limit_waiting(connection, 0)
            while True:
                request = json.loads(connection.recv_bytes(LARGEST))
                connection.send_bytes(json.dumps(self._answer(request, connection)).encode())

    def _is_admitted(self, connection: Connection) -> bool:
        try:
            limit_waiting(connection, ADMISSION_SECONDS)
            while self._secret is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._secret is not None, WATCH_SECONDS)
                if connection.poll(0):  # a client sends nothing before the greeting
                    connection.recv_bytes(0)
            connection.send_bytes(json.dumps(self._greeting).encode())
            if rejection := json.loads(connection.recv_bytes(LARGEST_FIRST)):
                self.rejection = {name: str(rejection[name]) for name in ("text", "code")}
                return False
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
        except SILENT:
            return False
        except STRANGE:
            self.refused += 1
            return False
        finally:
            self._strangers.pop(connection, None)
        return True

    def _answer(self, request: list[Any], connection: Connection) -> list[Any]:
        """Return [True, the result] or [False, why there is none]."""
        name, *values = request
        try:
            if name == "set":
                self.set(values[0], values[1].encode("latin-1"))
                return [True, None]
            if name == "add":
                return [True, self.add(*values)]
            if name == "check":
                return [True, self.check(*values)]
            keys, seconds = values
            self._wait(keys, seconds, client=connection)
            return [True, [self._values[key].decode("latin-1") for key in keys] if name == "get" else None]
        except DistStoreError as error:
            return [False, str(error)]
