"""Facts about the training itself for summary.json."""

from typing import Any

import torch

from lockstep.base import lifetime
from lockstep.base.events import Observer, StepDone
from lockstep.checkpoint import retention
from lockstep.recipe.components import Components
from lockstep.training.evaluation import Evaluation
from lockstep.training.loop_state import Training


class FirstStepTimer(Observer):
    """Measures the seconds from the start of the process to its first finished step."""

    seconds: float | None = None

    def notice(self, event: object) -> None:
        if self.seconds is None and isinstance(event, StepDone):
            self.seconds = round(lifetime.age_seconds(), 3)


def token_seconds(parts: Components, device: torch.device) -> float | None:
    """Return the seconds that all processes would take for a token at the peak of matrix products."""
    if (flops := parts.token_flops) is None:
        return None
    from lockstep.core.host.matmul_speed import peak_flops  # noqa: PLC0415 (for language models only)

    return flops / (peak_flops(parts.recipe.train.precision, device) * parts.world.size)


def training_summary(
    parts: Components, training: Training, *, evaluation: Evaluation | None, metrics: dict[str, float]
) -> dict[str, Any]:
    """Return steps, samples, speed, saves, and the last evaluation; `metrics` are empty where training has failed."""
    state, speed = parts.state, training.throughput.steady
    return {
        "steps": state.step,
        "epochs": round(parts.order.samples_at(state.step) / parts.order.samples, 4),
        "excluded_samples": len(parts.data.excluded),
        "samples_seen": parts.order.samples_at(state.step),
        "train_samples_per_second": round(speed, 2) if speed else None,
        "evaluation": metrics,
        "best": _best(training) if training.is_main else None,
        "labels": parts.data.train.spec.labels,
        "confusion_matrix": evaluation.confusion if evaluation and metrics else None,
        "chain": state.chain,
        "skipped_steps": state.skipped,
        "spikes": state.spikes.found,
        "saves": training.saving.facts(),
        "parent": state.parent,
        "drift": [change for change in state.drift if change["step"] < state.step],  # a step was trained with it
    }


def _best(training: Training) -> dict[str, Any] | None:
    """Return the checkpoint that `lockstep export` takes by checkpoint.best; None where the newest is taken."""
    section, known = training.checkpoint, retention.manifests(training.saving.writer.root)
    folder = retention.best(known, section)
    if folder is None:
        return None
    metrics = dict(known[folder].metrics)
    return {
        "step": known[folder].step,
        "metric": section.best,
        "value": metrics[str(section.best)],
        "evaluation": metrics,
    }
