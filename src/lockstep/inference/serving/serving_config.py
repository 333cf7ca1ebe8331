"""How a model is served."""

from dataclasses import dataclass

MOST_INPUTS = 256
"""In one request to /predict/batch."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of a server; every one of them is told in the answer that it causes."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any that is free."""
    max_batch: int = 32
    """Inputs that are predicted together at most."""
    max_wait_seconds: float = 0.0
    """How long the first of a batch waits for others. 0: a batch is what has come while the last one was computed."""
    queue: int = 1024
    """Inputs that may wait; a request that finds no room is answered with 503."""
    timeout_seconds: float = 30.0
    """From a request's arrival to its answer; then it is 504. As long may its body take to come; then it is 408."""
    body_bytes: int = 8 << 20
    """Of a request; a larger one is answered with 413."""
    drain_seconds: float = 20.0
    """After SIGTERM, what has been accepted is answered for so long."""
    api_key: str | None = None
    """What `Authorization: Bearer KEY` has to hold for all but the page, /docs, /health and /ready."""
