"""What the loss in the model's file says; nothing is measured besides it and the metrics of that file."""

METRICS: tuple[str, ...] = ()
