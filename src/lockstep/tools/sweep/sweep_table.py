"""A sweep as a table, and its best trial as lines for the config."""

from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping_console import wide_console
from lockstep.base.yaml_text import YamlDumper
from lockstep.tools.sweep.search_space import shown
from lockstep.tools.sweep.sweep_plan import settings_text
from lockstep.tools.sweep.sweep_state import Sweep, SweepTrial

STYLES = {"best": "bold green", "finished": "green", "pruned": "yellow"}
WIDTH = 160
"""Of a table in a log."""


def line(sweep: Sweep, trial: SweepTrial) -> str:
    """What has come of a trial."""
    if trial.state in ("failed", "pruned"):
        return f"{trial.name} · {settings_text(trial.settings)} · {trial.state}: {trial.note}"
    values = [f"{sweep.metric} {number(trial.value)}"]
    if sweep.metric != "loss":
        values.append(f"loss {number(trial.loss)}")
    return " · ".join([trial.name, settings_text(trial.settings), *values, f"{trial.seconds:,.1f} s"])


def print_sweep(sweep: Sweep, folder: Path, console: Console) -> None:
    """The table, the best trial first, and what to do with that."""
    wide_console(console, WIDTH).print(table(sweep))
    best = next((trial for trial in sweep.trials if trial.name == sweep.best), None)
    if best is None:
        return
    console.print(
        f"The best by {sweep.metric} is {folder / best.name}, with {number(best.value)}.\n\nLines for the config:\n",
        soft_wrap=True,
    )
    console.print(config_lines(best.settings), end="", soft_wrap=True)


def table(sweep: Sweep) -> Table:
    losses = [] if sweep.metric == "loss" else ["loss"]
    made = Table("trial", *(key.key for key in sweep.keys), sweep.metric, *losses, "seconds", "verdict")
    for column in made.columns[1:-1]:
        column.justify = "right"
    for trial in sweep.ranked():
        verdict = "best" if trial.name == sweep.best else trial.state
        made.add_row(
            trial.name,
            *(Text(shown(trial.settings[key.key])) for key in sweep.keys),
            number(trial.value),
            *(number(trial.loss) for _ in losses),
            f"{trial.seconds:,.1f}",
            Text(": ".join(filter(None, [verdict, trial.note])), STYLES.get(verdict, "red")),
        )
    return made


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def config_lines(settings: dict[str, Any]) -> str:
    """Settings as YAML."""
    sections: dict[str, Any] = {}
    for key, value in settings.items():
        *above, name = key.split(".")
        place = sections
        for part in above:
            place = place.setdefault(part, {})
        place[name] = value
    return yaml.dump(sections, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
