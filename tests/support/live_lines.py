"""Lines of a run with live recovery."""

import json

VOLATILE = ("samples_per_second",)


def lines(run):
    """metrics.jsonl without what depends on the clock."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in VOLATILE} for line in found]
