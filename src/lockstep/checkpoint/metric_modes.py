"""Mode of a metric: whether smaller values (min) or larger ones (max) are better."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

Mode = Literal["auto", "min", "max"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MIN = _words(
    "bits bpb bpc bpd brier cer deviance distance divergence ece eer energy entropy error fid kid kl lpips loss "
    "mad mae mape medae mse msle nll nmse nrmse perplexity ppl regret rmse rmsle rse smape sse ter wer wmape "
)
MAX = _words(
    "acc accuracy ap auc aupr auprc auroc bleu chrf correlation dice f1 hits iou jaccard kappa map match mcc "
    "meteor miou mrr ndcg pearson precision psnr r2 recall reward rouge sensitivity similarity spearman "
    "specificity ssim "
)
"""Last words of names that determine the mode."""
NEUTRAL = _words("avg at binary k macro mean micro samples score test top total val valid weighted")
"""Words that are ignored in names, as are numbers."""
REVERSING = frozenset({"neg", "negative", "inverse", "minus"})
SPELLED = {"bits_per_byte": "bits", "bits_per_character": "bits", "bits_per_token": "bits", "exact_match": "match"}


def mode_by_name(name: str) -> Literal["min", "max"] | None:
    """Return the mode that the last word of a name implies; None where it leaves doubt."""
    text = name.lower()
    for spelled, word in SPELLED.items():
        text = text.replace(spelled, word)
    words = [word for word in re.split(r"[^a-z0-9]+", text) if word not in NEUTRAL and not word.isdecimal()]
    if not words or REVERSING.intersection(words):
        return None
    return "min" if words[-1] in MIN else "max" if words[-1] in MAX else None


def is_better(metric: str, new: float, old: float | None, *, mode: Mode) -> bool:
    """Return whether a metric's new value is better than the old one. The first finite one is; NaN, infinity never.

    Where the mode is left open, the name decides; a run decides it before its first step.
    """
    if not math.isfinite(new):
        return False
    if old is None or not math.isfinite(old):
        return True
    mode = mode if mode != "auto" else mode_by_name(metric) or "max"
    return new < old if mode == "min" else new > old


def split_sign(name: str) -> tuple[str, Mode]:
    """Split `-nll`, whose smaller values are better, or `+score`, whose larger values are -> name, mode."""
    return (name[1:], "min" if name[0] == "-" else "max") if name[:1] in ("-", "+") else (name, "auto")


def without_sign(section: Any, metric: str, mode: str) -> Any:
    """Return the settings of a section, a mapping, with the sign of `metric` as its `mode`. Raises ValueError."""
    if not isinstance(section, Mapping) or not isinstance(section.get(metric), str):
        return section
    name, signed = split_sign(section[metric])
    if signed == "auto":
        return section
    if section.get(mode, "auto") not in ("auto", signed):
        raise ValueError(f"{metric}={section[metric]} and {mode}={section[mode]} contradict each other: leave one out")
    return {**section, metric: name, mode: signed}
