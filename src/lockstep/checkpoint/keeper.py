"""Which checkpoints stay: the newest few and the best; the only good one can never be deleted."""

import shutil
from itertools import dropwhile
from pathlib import Path

from lockstep.checkpoint.layout import CheckpointSection, listed, read_manifest
from lockstep.checkpoint.verify import problem

LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer", "brier", "ece")
"""Metrics whose name ends in one of these are better when smaller."""


def is_better(metric: str, new: float, old: float | None) -> bool:
    """Whether a metric's new value beats the old one; the first one always does, NaN never."""
    if new != new:
        return False
    if old is None:
        return True
    return new < old if metric.endswith(LOWER_IS_BETTER) else new > old


def best(root: Path, metric: str) -> Path | None:
    """The checkpoint with the best value of a metric (the older one of equals), or None when none has it."""
    found: tuple[float, Path] | None = None
    for folder in reversed(listed(root)):
        try:
            value = read_manifest(folder).metrics.get(metric)
        except (OSError, ValueError):
            continue
        if value is not None and is_better(metric, value, found[0] if found else None):
            found = value, folder
    return found[1] if found else None


def chosen(root: Path, section: CheckpointSection) -> Path | None:
    """The checkpoint that a finished run stands for: the best whole one if it keeps one, else the newest."""
    champion = best(root, section.best) if section.best else None
    candidates = [champion, *listed(root)] if champion else listed(root)
    return next((folder for folder in candidates if problem(folder) is None), None)


def tidy(root: Path, section: CheckpointSection, just_saved: Path | None = None) -> None:
    """Delete what is neither among the newest `keep` nor the best, and what killed saves have left behind.

    A run that has passed over damaged checkpoints saves older steps than theirs, so the newest ones are checked until
    one is whole (in a sound run the first, just written); as long as none is, nothing is deleted.
    """
    folders = listed(root)
    whole = list(dropwhile(problem, folders))
    stay = {*whole[: section.keep], *([just_saved] if just_saved else [])}
    if section.best and (champion := best(root, section.best)):
        stay.add(champion)
    for folder in folders if whole else []:
        if folder not in stay:
            shutil.rmtree(folder, ignore_errors=True)
    for leftover in root.glob("step-*.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
