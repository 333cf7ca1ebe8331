"""Reads the quantities to compare from the files of a run or of a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base.errors import ConfigError, absence
from lockstep.checkpoint import layout
from lockstep.observe.run_folder import RunFolder

LOGGED = ("learning_rate", "loss", "gradient_norm", "chain")
DIGESTS = ("digest", "training_digest")
EVALUATION = "evaluation "
"""Prefix of quantities of an evaluation: "evaluation accuracy"."""
DECIDED = ("finished", "stopped early")
"""Statuses of runs that ended by themselves."""
NAMES = {"run.name", "run.dir"}
"""Settings that always differ and change nothing."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    name: str
    """The path as it was given."""
    facts: Mapping[int, Mapping[str, Any]]
    """Step -> quantity -> value, ascending, from metrics.jsonl, summary.json and the manifests. Quantities are those of
    LOGGED for logged steps, metrics of evaluations, and digests of the weights."""
    checkpoints: Mapping[int, Path]
    numeric: Mapping[str, Any]
    """The numeric recipe; empty for a run that was killed before its first checkpoint."""
    settings: Mapping[str, Any]
    """Every setting of recipe.yaml by its dotted name; empty for a checkpoint outside of a run."""
    notes: list[str] = field(default_factory=list)
    end: str | None = None
    """Status of the run; None where it has not ended by itself."""

    @property
    def last(self) -> int:
        """The last step with any facts."""
        return max(self.facts, default=0)


def evidence(path: Path) -> Evidence:
    """Read the folder of a run or a checkpoint. Raises ConfigError when it is neither, or cannot be read."""
    folder = path.expanduser().absolute()
    is_checkpoint = (folder / layout.MANIFEST).is_file()
    if not is_checkpoint and not RunFolder(folder).has_settings:
        raise ConfigError(
            f"{path} is no run and no checkpoint: "
            f"{absence(folder, f'there is no recipe.yaml and no {layout.MANIFEST} in it')} (runs are folders such as "
            "runs/NAME, checkpoints such as runs/NAME/checkpoints/step-000000100)"
        )
    try:
        return _checkpoint_evidence(path, folder) if is_checkpoint else _run_evidence(path, folder)
    except (ConfigError, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _checkpoint_evidence(path: Path, folder: Path) -> Evidence:
    manifest = layout.read_manifest(folder)
    return Evidence(
        name=str(path),
        facts={manifest.step: _facts(manifest)},
        checkpoints={manifest.step: folder},
        numeric=manifest.numeric,
        settings=_settings(folder.parents[1]),
        notes=_drift_notes(path, manifest.progress.get("drift", [])),
    )


def _run_evidence(path: Path, folder: Path) -> Evidence:
    manifests, notes = {}, list[str]()
    facts = _read_metrics(RunFolder(folder, notes))
    for checkpoint in layout.listed(folder / "checkpoints"):
        try:
            manifests[checkpoint] = layout.read_manifest(checkpoint)
        except (OSError, ValueError) as error:
            notes.append(f"passed over {checkpoint}: {error}")
    for manifest in manifests.values():
        facts[manifest.step] = _facts(manifest) | facts.get(manifest.step, {})
    newest = next(iter(manifests.values()), None)
    numeric, drift = (newest.numeric, newest.progress.get("drift", [])) if newest else ({}, [])
    end = None
    problems = list[str]()
    summary = RunFolder(folder, problems).summary()
    if problems:
        raise ValueError(problems[0])
    if summary.status:  # empty while a run goes on, and after a kill
        numeric, drift = summary.numeric_recipe or numeric, [each.model_dump() for each in summary.drift] or drift
        if summary.status != "failed":  # a failed run's chain lacks what it had not read yet
            known = summary.model_dump(include={"chain", *DIGESTS}, exclude_none=True) | _quantities(summary.evaluation)
            facts[summary.steps or 0] = known | facts.get(summary.steps or 0, {})
            end = summary.status if summary.status in DECIDED else None
    return Evidence(
        name=str(path),
        facts=dict(sorted(facts.items())),
        checkpoints={manifest.step: checkpoint for checkpoint, manifest in manifests.items()},
        numeric=numeric,
        settings=_settings(folder),
        notes=notes + _drift_notes(path, drift),
        end=end,
    )


def _facts(manifest: layout.Manifest) -> dict[str, Any]:
    chain = manifest.progress.get("chain")
    return {"digest": manifest.digest, **({"chain": chain} if chain else {}), **_quantities(manifest.metrics)}


def _quantities(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantities of an evaluation; non-finite ones are None, as in metrics.jsonl."""
    return {
        f"{EVALUATION}{name}": None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _read_metrics(run: RunFolder) -> dict[int, dict[str, Any]]:
    """Read the logged quantities -> step -> quantity -> value."""
    found: dict[int, dict[str, Any]] = {}
    for line in run.metric_lines():
        known = found.setdefault(line.step, {})
        if line.kind == "evaluation":
            known |= _quantities(line.values)
            continue
        known |= {name: line.values[name] for name in LOGGED if name in line.values}
        if line.chain is not None:
            known["chain"] = line.chain
    return found


def _settings(run: Path) -> dict[str, Any]:
    sections = RunFolder(run).settings() if RunFolder(run).has_settings else {}
    flat = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in flat.items() if name not in NAMES}


def _drift_notes(path: Path, drift: list[dict[str, Any]]) -> list[str]:
    return [
        f"{path} was resumed after step {each['step']} with another {each['field']}: "
        f"{each['before']!r} before, {each['now']!r} since"
        for each in drift
    ]
