"""What a config asks to be measured, and by what it decides."""

from collections.abc import Sequence
from typing import Literal

from lockstep.base.errors import ConfigError, nearest
from lockstep.training.metrics.classifier_metrics import CONFUSION

Asked = Literal["auto"] | tuple[str, ...]
"""The names that are to be reported beside the loss, or "auto": all there are. "NAME.PART" asks for all of NAME."""


def is_asked(name: str, asked: Asked) -> bool:
    """Whether a metric, or a sum that comes with the loss, is to be reported; the confusion matrix belongs to accuracy
    and f1."""
    if asked == "auto":
        return True
    names = {each.partition(".")[0] for each in asked}
    return name in names or (name == CONFUSION and not names.isdisjoint(("accuracy", "f1")))


def check(setting: str, name: str | None, known: Sequence[str], *, are_all: bool) -> None:
    """Raise ConfigError where a setting names a metric that is not measured. Where some could not be computed yet
    (`are_all` is false) their parts are not known, and NAME.PART passes for a known NAME."""
    parents = {each.partition(".")[0] for each in known}
    if name is None or name in known or (setting == "evaluate.metrics" and name in {*parents, CONFUSION}):
        return
    if are_all or name.partition(".")[0] not in parents:
        raise ConfigError(
            f"{setting}: there is no metric {name!r}{nearest(name, list(known))} (there is: {', '.join(known)})"
        )
