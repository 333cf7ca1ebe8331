"""The loss in the model's file; nothing is measured besides it and the metrics of that file."""

METRICS: tuple[str, ...] = ()
