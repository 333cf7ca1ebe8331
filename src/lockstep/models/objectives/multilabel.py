"""Any number of classes for each sample."""

METRICS = ("exact_match", "f1", "f1_micro")
