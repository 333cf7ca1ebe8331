"""Calibration error of confidences, and temperature scaling, which reduces it."""

import numpy as np
import torch
from torch import Tensor

from lockstep.base.errors import ModelError
from lockstep.data.order import mix
from lockstep.inference.export.export_facts import Calibration

BINS = 15
LOWEST, HIGHEST = 0.05, 20.0
"""Bounds of the temperature: if all samples are predicted correctly, the optimum would be 0."""
PRECISION = 1e-7


def ece(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    """Return the expected calibration error: the distance between confidence and accuracy in 15 bins, averaged over the
    samples (Naeini et al., 2015). Not torchmetrics', which gives a confidence of exactly 1 a bin of its own."""
    confidence, predicted = (logits / temperature).softmax(-1).max(1)
    bins = reliability(confidence, predicted == labels)
    return sum(each["samples"] * abs(each["confidence"] - each["accuracy"]) for each in bins) / len(labels)


def fitted(logits: Tensor, labels: Tensor) -> Calibration:
    """Fit the temperature with the lowest cross-entropy on one half of the samples, and measure it on the other (C. Guo
    et al., On Calibration of Modern Neural Networks, ICML 2017). Raises ModelError if a half is empty."""
    first = half(len(labels))
    if first.all() or not first.any():
        raise ModelError("--calibrate needs more samples")
    temperature = _best_temperature(logits[first].double(), labels[first])
    return Calibration(
        temperature=temperature,
        samples=int(first.sum()),
        ece_before=ece(logits[~first], labels[~first]),
        ece_after=ece(logits[~first], labels[~first], temperature),
    )


def _best_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature in [LOWEST, HIGHEST] with the lowest cross-entropy of logits float64 [N, C] and labels
    [N], to a relative precision of 1e-7.

    Cross-entropy is convex in the inverse temperature b, so its derivative, the mean of sum_c(p_c * z_c) - z_label
    with p = softmax(b * z), changes sign once: bisection on a logarithmic scale.
    """
    own = logits.gather(1, labels[:, None]).squeeze(1)
    low, high = np.log([LOWEST, HIGHEST])
    while high - low > PRECISION:
        middle = (low + high) / 2
        slope = ((logits / np.exp(middle)).softmax(1) * logits).sum(1).sub(own).mean()
        low, high = (low, middle) if slope <= 0 else (middle, high)  # slope < 0: a smaller temperature is better
    return float(np.exp((low + high) / 2))


def half(samples: int) -> Tensor:
    """Return a mask of the first half, bool [samples]; by a hash, because the samples may be sorted by class."""
    return torch.from_numpy((mix(np.arange(samples, dtype=np.uint64)) >> np.uint64(63)).astype(bool))


def reliability(confidence: Tensor, is_right: Tensor) -> list[dict[str, float]]:
    """Return bounds, number of samples, mean confidence and accuracy of each bin that is not empty."""
    edges = np.linspace(0, 1, BINS + 1)
    values, right = confidence.double().numpy(), is_right.double().numpy()
    counts, sums, hits = (np.histogram(values, edges, weights=w)[0] for w in (np.ones_like(values), values, right))
    return [
        {
            "from": round(float(edges[i]), 6),
            "to": round(float(edges[i + 1]), 6),
            "samples": int(counts[i]),
            "confidence": float(sums[i] / counts[i]),
            "accuracy": float(hits[i] / counts[i]),
        }
        for i in np.flatnonzero(counts)
    ]
