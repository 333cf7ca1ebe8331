"""Evidence that a run's weights are those of a training that never saw the samples that data.exclude leaves out."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.data.exclusion import excluded_samples, summed
from lockstep.recipe.components import Components
from lockstep.recipe.splits import EXCLUDED

FILE = "certificate.json"


def settle_drift(parts: Components, warn: Callable[[str], None]) -> None:
    """Drop data.exclude from the settings that have changed, where no earlier step had a sample that is left out now
    and was not before, or the reverse: the state is that of a training that left them out from its start."""
    data, state = parts.data, parts.state
    changes = [each for each in state.drift if each["field"] == EXCLUDED and each["step"] == state.step]
    for change in changes:
        files = data.recipe.data.exclude
        earlier = (excluded_samples(files[:count], data.train) for count in range(len(files)))
        before = next((each for each in earlier if summed(each, data.train) == change["before"]), None)
        if parts.recipe.train.class_weights == "balanced":  # which have counted them
            continue
        if before is not None and parts.order.first_use(np.setxor1d(before, data.excluded), state.step) is None:
            state.drift.remove(change)
    if changes and state.drift:
        names = ", ".join(dict.fromkeys(each["field"] for each in state.drift))
        warn(f"there will be no {FILE}, as no training from the start gives these weights: changed was {names}")


def certificate(parts: Components, summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return the contents of certificate.json; None for a run without excluded samples, or with changed settings."""
    data, state, section = parts.data, parts.state, parts.recipe.data
    if not len(data.excluded) or state.drift or summary["status"] == "failed":
        return None
    first, start = parts.order.first_use(data.excluded, state.step), state.parent["step"] if state.parent else 0
    place = (
        "would have had none of them" if first is None else f"would have had one for the first time in step {first + 1}"
    )
    kept = {
        "their number: they keep their places in the order, so that epochs and learning rates are as with them": True,
        "their lengths, by which all samples are sorted": data.train.lengths is not None,
        "the list of classes, also of those that only they have": bool(data.train.spec.labels),
        "the weights of model.init, which may come of a training on them": parts.recipe.model.init is not None,
        "where the samples begin that are cut from the joined texts": section.PACKS,
        "what data.file computes from all samples, such as means, which Lockstep does not see": section.code
        is not None,
    }
    return {
        "claim": "bit for bit the weights of a training with this recipe that never saw these samples",
        "samples": data.excluded.tolist(),
        "sum": summed(data.excluded, data.train),
        "from": state.parent or "the start",
        "why": f"The order is a function of the seed and the number of samples. Computed for each of {state.step} "
        f"steps, it {place}; they are left out from step {start + 1} on.",
        "depends_on": [what for what, holds in kept.items() if holds],
        **{name: summary[name] for name in ("steps", "digest", "chain", "numeric_recipe")},
    }
