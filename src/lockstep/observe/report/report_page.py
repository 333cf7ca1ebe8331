"""One or several runs as an HTML page without external resources: curves, timeline, time spent, settings, digests."""

import json
from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lockstep.base import storage
from lockstep.base.errors import printable
from lockstep.base.templates import ROOT, render
from lockstep.observe.report.charts import charts, table
from lockstep.observe.report.goodput import Goodput, Start, goodput, starts
from lockstep.observe.report.run_files import RunFiles, with_parent
from lockstep.observe.report.timeline import TimelineEvent, timeline
from lockstep.observe.run_lines import HistoryLine

FILE = "report.html"
LIBRARY = "observe/report/uplot"
COLOURS = ("#2f6fb3", "#d55e00", "#009e73", "#cc79a7", "#8800ff", "#8f5230", "#b01878", "#e85cf0")
"""Colours of runs. One run uses the first two, for training and test: clear without seeing red or green, too."""
MOST_CLASSES = 30
"""Limit of the confusion matrix; with more classes, the most frequent confusions are listed."""
MOST_CONFUSIONS = 20
SAVED_SETTINGS = ("run.name", "run.dir")
"""Settings that differ between any two runs."""


def write(folder: Path) -> Path:
    """Write the page of a run into its folder. Raises OSError."""
    target = folder / FILE
    storage.write(target, html(with_parent(folder)))
    return target


def html(runs: Sequence[RunFiles]) -> str:
    """Render the page of these runs, side by side."""
    names, histories = names_of(runs), [starts(run.history) for run in runs]
    drawn = charts(runs)
    # summary.json is removed at the start and written at the end
    timelines = [timeline(each, is_running=not run.summary.status) for run, each in zip(runs, histories, strict=True)]
    marks = [
        {"run": number, "step": each.step, "text": each.text}
        for number, timeline_events in enumerate(timelines)
        for each in timeline_events
        if each.is_mark
    ]
    data = {"names": names, "colours": COLOURS, "marks": marks, "charts": [chart.plain() for chart in drawn]}
    page = render(
        "observe/report/page.html",
        title=", ".join(names),
        made=datetime.now().astimezone(),
        script=Markup((ROOT / LIBRARY / "uPlot.min.js").read_text(encoding="utf-8")),
        style=Markup((ROOT / LIBRARY / "uPlot.min.css").read_text(encoding="utf-8")),
        data=Markup(json.dumps(data).replace("<", "\\u003c")),
        charts=[(chart, *table(chart, names)) for chart in drawn],
        runs=[
            run_section(run, history, entries) | {"name": name, "colour": COLOURS[number % len(COLOURS)]}
            for number, (run, name, history, entries) in enumerate(zip(runs, names, histories, timelines, strict=True))
        ],
        facts=_side_by_side([facts(run, goodput(history)) for run, history in zip(runs, histories, strict=True)]),
        differences=differences(runs),
    )
    return printable(page)


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """Return the runs' names, or their folders where two have the same name."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)]


def run_section(run: RunFiles, history: Sequence[Start], entries: Sequence[TimelineEvent]) -> dict[str, Any]:
    """Return the values that the page shows of one run, besides its name."""
    spent = goodput(history)
    began = history[0].began if history else 0.0
    origin = run.summary.model_dump(include={"digest", "chain", "device", "torch_version"}, exclude_none=True)
    return {
        "parts": parts(spent) if spent else [],
        "goodput": spent,
        "timeline": [
            {"event": each, "when": datetime.fromtimestamp(each.time).astimezone(), "after": each.time - began}
            for each in entries
        ],
        "matrix": matrix(run),
        "worst": run.evaluation.worst,
        "texts": texts(run),
        "settings": [*((key.replace("_", " "), value) for key, value in origin.items()), *sorted(run.settings.items())],
        "numeric": sorted(run.summary.numeric_recipe.items()),
        "notes": run.notes,
    }


def _side_by_side(columns: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, list[str]]]:
    """Return each label with its values, one for each column."""
    found = [dict(column) for column in columns]
    return [(label, [column.get(label, "") for column in found]) for label in dict.fromkeys(chain(*found))]


def facts(run: RunFiles, spent: Goodput | None) -> list[tuple[str, str]]:
    """Return the labels and values at the top."""
    summary = run.summary
    last = run.curves["loss"].steps[-1] if "loss" in run.curves else 0
    found = [("status", summary.status or "running, or killed"), ("steps", f"{summary.steps or last:,}")]
    for label, value, form in (
        ("epochs", summary.epochs, "{:g}"),
        ("processes", summary.world_size, "{}"),
        ("samples/s", summary.train_samples_per_second, "{:,.1f}"),
        ("first step, s", summary.first_step_seconds, "{:.1f}"),
        *((f"test {name}", value, "{:.4f}") for name, value in summary.evaluation.items()),
    ):
        if value is not None:
            found.append((label, form.format(value)))
    if parent := run.summary.parent:
        name, step, digest = (str(parent.get(key)) for key in ("run", "step", "digest"))
        found.append(("forked from", f"{Path(name).name}, step {step}, digest {digest[:16]}"))
    if spent:
        found.append(("goodput", f"{spent.share:.1%}"))
    return found


def parts(spent: Goodput) -> list[dict[str, Any]]:
    """List the parts of the time, by what it was spent on."""
    wall = spent.wall or 1.0
    named = [
        ("steps that count", spent.steps, "good"),
        ("steps done again", spent.repeated, "bad"),
        ("evaluations", spent.evaluations, "test"),
        ("saves", spent.saves, "save"),
        ("recoveries", spent.recoveries, "live"),
        ("between starts", spent.down, "down"),
        ("rest", spent.rest, "rest"),
    ]
    return [{"name": n, "seconds": s, "share": min(s / wall, 1.0), "kind": kind} for n, s, kind in named]


def texts(run: RunFiles) -> list[HistoryLine]:
    """List the first and the last texts that a language model generated."""
    by_step = {line.step: line for line in run.history if line.texts}
    return [by_step[step] for step in sorted({min(by_step), max(by_step)})] if by_step else []


def matrix(run: RunFiles) -> dict[str, Any] | None:
    """Return the confusion matrix [true][predicted] with the share of each row, or the most frequent confusions."""
    counts = run.summary.confusion_matrix
    if not counts:
        return None
    labels = run.summary.labels
    names = labels if len(labels) == len(counts) else [str(number) for number in range(len(counts))]
    if len(counts) > MOST_CLASSES:
        pairs = [(n, names[i], names[j]) for i, row in enumerate(counts) for j, n in enumerate(row) if n and i != j]
        return {"confusions": sorted(pairs, reverse=True)[:MOST_CONFUSIONS]}
    rows = [
        (name, [(number, number / (sum(row) or 1), i == j) for j, number in enumerate(row)])
        for i, (name, row) in enumerate(zip(names, counts, strict=True))
    ]
    return {"names": names, "rows": rows}


def differences(runs: Sequence[RunFiles]) -> list[list[Any]]:
    """List the settings in which the runs differ, each with the values of all runs."""
    keys = sorted({key for run in runs for key in run.settings} - set(SAVED_SETTINGS))
    rows = [[key, *(run.settings.get(key, "") for run in runs)] for key in keys]
    return [row for row in rows if any(value != row[1] for value in row[1:])]
