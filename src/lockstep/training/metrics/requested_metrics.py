"""Metric names in a config: which are reported, and whether they exist."""

from collections.abc import Sequence
from typing import Literal

from lockstep.base.errors import ConfigError, nearest
from lockstep.training.metrics.classifier_metrics import CONFUSION

Requested = Literal["auto"] | tuple[str, ...]
"""evaluate.metrics: the names to report besides the loss, or "auto" for all. "NAME.PART" requests all of NAME."""


def is_requested(name: str, requested: Requested) -> bool:
    """Whether a metric, or one of LossSum.sums, is reported; accuracy and f1 imply the confusion matrix."""
    if requested == "auto":
        return True
    names = {each.partition(".")[0] for each in requested}
    return name in names or (name == CONFUSION and not names.isdisjoint(("accuracy", "f1")))


def check(setting: str, name: str | None, known: Sequence[str], *, are_all: bool) -> None:
    """Raise ConfigError if a setting names a metric that is not measured. With `are_all` false, some metrics could not
    be computed yet: their parts are unknown, and NAME.PART passes for a known NAME."""
    parents = {each.partition(".")[0] for each in known}
    if name is None or name in known or (setting == "evaluate.metrics" and name in {*parents, CONFUSION}):
        return
    if are_all or name.partition(".")[0] not in parents:
        raise ConfigError(
            f"{setting}: there is no metric {name!r}{nearest(name, list(known))} (there is: {', '.join(known)})"
        )
