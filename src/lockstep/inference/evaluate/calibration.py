"""How far confidences can be believed, and the one number that mends them."""

import numpy as np
import torch
from torch import Tensor

from lockstep.base.errors import ModelError
from lockstep.data.order import mix
from lockstep.inference.export.export_facts import Calibration

BINS = 15
LOWEST, HIGHEST = 0.05, 20.0
PRECISION = 1e-7
"""Temperatures: where all samples of a half are right, the best would be 0."""


def ece(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    """Expected calibration error: how far confidence and accuracy lie apart in 15 bins of confidence, on average over
    the samples (Naeini et al., 2015). Not torchmetrics', which gives a confidence of exactly 1 a bin of its own."""
    confidence, predicted = (logits / temperature).softmax(-1).max(1)
    bins = reliability(confidence, predicted == labels)
    return sum(each["samples"] * abs(each["confidence"] - each["accuracy"]) for each in bins) / len(labels)


def fitted(logits: Tensor, labels: Tensor) -> Calibration:
    """The temperature that makes the labels most likely, fitted on one half of the samples, which a hash of their
    numbers picks, and measured on the other. Raises ModelError where a half has no sample.

    Source: C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    """
    first = half(len(labels))
    if first.all() or not first.any():
        raise ModelError("--calibrate needs more samples")
    rows, known = logits[first].double(), labels[first]
    temperature = _likeliest(rows, known)
    return Calibration(
        temperature=temperature,
        samples=len(known),
        ece_before=ece(logits[~first], labels[~first]),
        ece_after=ece(logits[~first], labels[~first], temperature),
    )


def _likeliest(rows: Tensor, known: Tensor) -> float:
    """The temperature in [LOWEST, HIGHEST] at which labels [N] are most likely by logits float64 [N, C], to 1e-7 of it.

    The negative log-likelihood is convex in the inverse temperature b, so its slope there, the mean of
    sum_c(p_c * z_c) - z_label with p = softmax(b * z), changes its sign once: bisection on a scale of logarithms.
    """
    own = rows.gather(1, known[:, None]).squeeze(1)
    low, high = np.log([LOWEST, HIGHEST])
    while high - low > PRECISION:
        middle = (low + high) / 2
        slope = ((rows / np.exp(middle)).softmax(1) * rows).sum(1).sub(own).mean()
        low, high = (low, middle) if slope <= 0 else (middle, high)  # a larger b, so a smaller temperature, is likelier
    return float(np.exp((low + high) / 2))


def half(samples: int) -> Tensor:
    """Which of them belong to the first half, bool [samples]: whatever order they are in, it must not sort them."""
    return torch.from_numpy((mix(np.arange(samples, dtype=np.uint64)) >> np.uint64(63)).astype(bool))


def reliability(confidence: Tensor, is_right: Tensor) -> list[dict[str, float]]:
    """Of each bin that holds samples: its bounds, how many, how confident and how often right they are on average."""
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
