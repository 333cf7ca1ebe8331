"""Settings of a server."""

from dataclasses import dataclass

MAX_INPUTS = 256
"""Maximum number of inputs in one request to /predict/batch."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Address and limits; a response that is caused by a limit names it."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Port; 0 takes any free one."""
    max_batch: int = 32
    """Largest number of inputs in a forward pass."""
    max_wait_seconds: float = 0.0
    """Time that the first input of a batch waits for others. 0: a batch is what arrived during the previous one."""
    queue: int = 1024
    """Maximum number of waiting inputs; beyond that, a request is answered with 503."""
    timeout_seconds: float = 30.0
    """Time from a request's arrival to its response, else 504. Also for its body to arrive, else 408."""
    body_bytes: int = 8 << 20
    """Maximum size of a request; a larger one is answered with 413."""
    drain_seconds: float = 20.0
    """Time to answer accepted requests after SIGTERM."""
    api_key: str | None = None
    """Key, required as `Authorization: Bearer KEY`, except for the page, /docs, /health and /ready."""
