"""One class for each word of a text."""

METRICS = ("accuracy", "f1", "entity_f1")
