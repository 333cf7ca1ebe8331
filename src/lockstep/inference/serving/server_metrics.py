"""A server's Prometheus metrics."""

from collections.abc import Callable

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """Requests, latency, batches and the queue; in a registry of its own, as a process may hold several servers."""

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

    def record_response(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, status).inc()
        self._latency.labels(path).observe(seconds)

    def record_batch(self, size: int, seconds: float) -> None:
        self._size.observe(size)
        self._batch.observe(seconds)

    def watch_queue(self, depth: Callable[[], float]) -> None:
        """Read the queue's depth whenever metrics are requested."""
        self._queue.set_function(depth)

    def text(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and its media type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST
