"""One class for each sample."""

METRICS = ("accuracy", "f1")
