"""Finds a learning rate by a range test: a short training whose rate rises from far too small to far too large.

L. Smith, Cyclical Learning Rates for Training Neural Networks, 2017.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.observe.progress_bar import counting
from lockstep.observe.svg_figure import CHART, Figure, draw_svg
from lockstep.recipe.recipe import Recipe
from lockstep.tools.tune import trial_process
from lockstep.tools.tune.loss_curve import Curve
from lockstep.tools.tune.trial_process import TrialRequest

ENDS = {
    "done": "all steps were done",
    "diverged": "the loss was more than 4 times its best",
    "not finite": "the next loss was NaN or infinite",
}
RAW, SMOOTH, SUGGESTED, LOWEST = "#9db4c8", "#1f5f99", "#c0392b", "#2e7d32"
LEAST_SPAN = 0.05
"""Fraction of the loss that the y axis covers at least: less is rounding."""


def find(recipe: Recipe, rates: tuple[float, ...], *, picture: Path, console: Console) -> float | None:
    """Sweep, print and draw the result, and return optim.lr for the config; None where there is no good rate. Raises
    ConfigError where memory runs out or the picture cannot be written, TrialFailed where the sweep fails."""
    base, batch = recipe.optim.base_batch, recipe.train.global_batch
    factor = base / batch if base else 1.0  # from the rate in use to optim.lr, which the linear rule scales
    rule = f", which is optim.lr times {1 / factor:g}" if factor != 1 else ""
    text = f"{len(rates)} steps of {batch} samples, rate from {rates[0]:.2g} to {rates[-1]:.2g}{rule}"
    console.print(text, soft_wrap=True)
    with counting(console, "sweeping", "steps", total=len(rates), done=0) as counter:
        curve = sweep(recipe, rates, lambda done: counter.add(done - counter.done))
    best = curve.steepest
    lines = [no_rate(curve, rates)] if best is None else suggestion(curve, best, factor)
    if len(curve.losses) > 1:
        what = f"{recipe.model.kind} on {recipe.data.kind}, {recipe.optim.kind}"
        title = f"Learning-rate range test: {what}, {batch} samples a step"
        label = "learning rate" if factor == 1 else f"learning rate used (optim.lr times {1 / factor:g})"
        try:
            storage.write(picture, svg(curve, title, rate=label))
        except OSError as error:
            raise ConfigError(f"cannot write {picture}: {error.strerror}; name another file with --out") from None
        lines.append(f"The curve is in {picture}")
    console.print(*lines, sep="\n", soft_wrap=True)
    return None if best is None else float(f"{curve.rates[best] * factor:.2g}")


def sweep(recipe: Recipe, rates: tuple[float, ...], report: Callable[[int], None]) -> Curve:
    """Run the sweep in a process of its own, whose weights end with it; `report` gets the number of steps done."""
    settings = {"steps": len(rates), "ema": None}
    request = TrialRequest(recipe=trial_process.alone(recipe, data={}, train=settings), rates=rates)
    trial = trial_process.run(request, on_steps=report)
    if trial.verdict in ("killed", "out of memory"):
        what = f"the sweep ran out of memory with train.micro_batch={recipe.train.micro_batch}"
        raise ConfigError(f"{what}; lockstep tune --micro-batch finds one that fits")
    if trial.verdict == "fails":
        raise trial.failure("the sweep")
    return Curve.of(rates, trial.losses)


def suggestion(curve: Curve, best: int, factor: float) -> list[str]:
    """Describe the rate to take from a curve that falls fastest at step `best`."""
    rate, lowest = curve.rates[best], curve.rates[curve.lowest] * factor
    rule = f" (the rate used is then {rate:.2g}: the linear rule multiplies by {1 / factor:g})" if factor != 1 else ""
    where = ": too near to where training diverges."
    if curve.end == "done" and curve.lowest == len(curve.losses) - 1:
        where = ", the end of the sweep: it still falls there, and a larger --to may show more."
    lines = [
        f"optim.lr={rate * factor:.2g}{rule}: here the loss falls fastest.",
        f"For comparison, the loss is lowest, {curve.smoothed[curve.lowest]:.3g}, at optim.lr={lowest:.2g}{where}",
    ]
    if curve.end != "done":
        lines.append(f"The sweep ended at a rate of {curve.rates[-1]:.2g}: {ENDS[curve.end]}.")
    return lines


def no_rate(curve: Curve, rates: tuple[float, ...]) -> str:
    """Explain why there is no rate to suggest, and what to do."""
    if not len(curve.losses):
        what = "No rate: the loss is NaN or infinite in the first step, before any update. No learning rate mends that"
        return f"{what}: look at the data, at the loss, and at train.precision."
    last = curve.rates[-1]
    if not curve.is_readable:
        what = f"No rate: {ENDS[curve.end]} after {len(curve.losses)} steps already"
        return f"{what}, at a rate of {last:.2g}. Start lower, with --from."
    spread = f"from {curve.start_loss:.4g} to {curve.smoothed[curve.lowest]:.4g} at best"
    noise = f", while single losses vary by {curve.noise:.2g}" if curve.noise else ""
    remedy = "Start lower, with --from." if curve.end != "done" else "Go further, with --to, or take more --steps."
    return (
        f"No rate: the loss falls nowhere between {rates[0]:.2g} and {last:.2g} ({spread}{noise}). {remedy} "
        "If that does not help, the model may not learn at all: look at its loss and its labels."
    )


def svg(curve: Curve, title: str, *, rate: str = "learning rate") -> str:
    """Draw raw and smoothed loss over the learning rate (log scale), with the suggested and the lowest point marked.
    `rate` labels the x axis."""

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 5.4)
        axes = figure.add_subplot(xscale="log", xlabel=f"{rate}, log scale", ylabel="training loss", ylim=limits(curve))
        axes.set_title(title)
        axes.plot(curve.rates, curve.losses, color=RAW, linewidth=1.2, label="loss of each step")
        axes.plot(curve.rates, curve.smoothed, color=SMOOTH, linewidth=2.4, label="smoothed")
        if (best := curve.steepest) is not None:
            axes.axvline(curve.rates[best], color=SUGGESTED, linestyle="--")
            labels = f"lowest at {curve.rates[curve.lowest]:.2g}", f"suggestion {curve.rates[best]:.2g}: falls fastest"
            for step, color, label in zip((curve.lowest, best), (LOWEST, SUGGESTED), labels, strict=True):
                place = curve.rates[step], curve.smoothed[step]
                axes.plot(*place, "o", color=color, markeredgecolor="white", label=label)
        figure.legend(loc="outside lower center", ncols=4)

    return draw_svg(draw, settings=CHART, metadata={"Title": title})


def limits(curve: Curve) -> tuple[float, float]:
    """Return the range of the losses up to the lowest point. A later divergence leaves the frame at the top."""
    end = curve.lowest + 1 if curve.is_readable else len(curve.losses)
    shown = np.concatenate([curve.losses[:end], curve.smoothed[:end]])
    low, high = float(shown.min()), float(shown.max())
    span = max(high - low, LEAST_SPAN * abs(high)) or 1.0
    return low - 0.08 * span, high + 0.25 * span
