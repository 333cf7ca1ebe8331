"""How far confidences can be believed, and the one number that mends them."""

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ModelError
from lockstep.export.facts import Calibration

BINS = 15
LOWEST, HIGHEST = 0.05, 20.0
"""Temperatures: where all samples of a half are right, the best would be 0."""


def ece(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    """Expected calibration error: how far confidence and accuracy lie apart in 15 bins of confidence, on average over
    the samples (Naeini et al., 2015)."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    probabilities = (logits / temperature).softmax(-1)
    found = multiclass_calibration_error(
        probabilities, labels, num_classes=logits.shape[1], n_bins=BINS, norm="l1", validate_args=False
    )
    return float(found)


def fitted(logits: Tensor, labels: Tensor) -> Calibration:
    """The temperature that makes the labels most likely, fitted on every second sample from the first on and measured
    on the others. Raises ModelError for fewer than two samples.

    Source: C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    """
    from scipy.optimize import minimize_scalar

    if len(labels) < 2:
        raise ModelError("--calibrate needs two samples or more")
    rows, known = logits[::2].double(), labels[::2]

    def surprise(exponent: float) -> float:
        return float(F.cross_entropy(rows / np.exp(exponent), known))

    found = minimize_scalar(surprise, bounds=np.log([LOWEST, HIGHEST]), method="bounded", options={"xatol": 1e-6})
    temperature = float(np.exp(found.x))
    return Calibration(
        temperature=temperature,
        samples=len(known),
        ece_before=ece(logits[1::2], labels[1::2]),
        ece_after=ece(logits[1::2], labels[1::2], temperature),
    )


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
