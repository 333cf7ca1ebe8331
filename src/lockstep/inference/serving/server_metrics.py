"""What a server counts, for Prometheus."""

from collections.abc import Callable

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Meters:
    """Requests, their latency, batches and the queue; its own registry, so that a process may hold several."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

        disable_created_metrics()

        self.registry = CollectorRegistry()
        self._requests = Counter(
            "lockstep_requests", "Requests that were answered", ["path", "status"], registry=self.registry
        )
        self._latency = Histogram(
            "lockstep_request_seconds", "From request to answer", ["path"], buckets=SECONDS, registry=self.registry
        )
        self._size = Histogram(
            "lockstep_batch_size", "Inputs predicted together", buckets=SIZES, registry=self.registry
        )
        self._batch = Histogram(
            "lockstep_batch_seconds", "Time of a forward pass", buckets=SECONDS, registry=self.registry
        )
        self._queue = Gauge("lockstep_queue_inputs", "Inputs that wait", registry=self.registry)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A request to one of the server's paths has been answered."""
        self._requests.labels(path, status).inc()
        self._latency.labels(path).observe(seconds)

    def ran(self, size: int, seconds: float) -> None:
        self._size.observe(size)
        self._batch.observe(seconds)

    def watch_queue(self, depth: Callable[[], float]) -> None:
        """Read the queue's depth whenever somebody asks."""
        self._queue.set_function(depth)

    def text(self) -> tuple[bytes, str]:
        """All of it in Prometheus' own form, and the name of that form."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST
