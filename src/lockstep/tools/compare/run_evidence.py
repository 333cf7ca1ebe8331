"""What the files of a run or of a checkpoint say about its bits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic_core
import yaml

from lockstep.base import storage
from lockstep.base.errors import ConfigError, absence
from lockstep.base.yaml_text import KeyLocations, read, read_file
from lockstep.checkpoint import layout

LOGGED = ("learning_rate", "loss", "gradient_norm", "chain")
DIGESTS = ("digest", "training_digest")
EVALUATION = "evaluation "
"""Prefix of quantities of an evaluation: "evaluation accuracy"."""
DECIDED = ("finished", "stopped early")
"""Status of a run that ended by itself."""
FIELDS = {"numeric_recipe": dict, "evaluation": dict, "drift": list, "steps": int}
"""Fields of summary.json and their types."""
MOST_BYTES = 1 << 30
"""Size limit of metrics.jsonl."""
NOT_MEASURED = ("kind", "step", "epoch", "samples")
"""Fields of an evaluation's line that are no metrics."""
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
    if not is_checkpoint and not (folder / "recipe.yaml").is_file():
        raise ConfigError(
            f"{path} is no run and no checkpoint: "
            f"{absence(folder, f'there is no recipe.yaml and no {layout.MANIFEST} in it')} (runs are folders such as "
            "runs/NAME, checkpoints such as runs/NAME/checkpoints/step-000000100)"
        )
    try:
        return _of_checkpoint(path, folder) if is_checkpoint else _of_run(path, folder)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _of_checkpoint(path: Path, folder: Path) -> Evidence:
    manifest = layout.read_manifest(folder)
    return Evidence(
        name=str(path),
        facts={manifest.step: _facts(manifest)},
        checkpoints={manifest.step: folder},
        numeric=manifest.numeric,
        settings=_settings(folder.parents[1] / "recipe.yaml"),
        notes=_drifted(path, manifest.progress.get("drift", [])),
    )


def _of_run(path: Path, folder: Path) -> Evidence:
    facts: dict[int, dict[str, Any]] = _logged(folder / "metrics.jsonl")
    manifests, notes = {}, []
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
    if (folder / "summary.json").exists():  # missing while a run goes on, and after a kill
        summary = storage.read_json(folder / "summary.json")
        for name, kind in FIELDS.items():
            if not isinstance(summary.get(name) or kind(), kind):
                raise ValueError(f"{name} in summary.json is no {kind.__name__}")
        numeric, drift = summary.get("numeric_recipe", numeric), summary.get("drift", drift)
        if summary.get("status") != "failed":  # a failed run's chain lacks what it had not read yet
            known = {name: summary[name] for name in ("chain", *DIGESTS) if summary.get(name) is not None}
            known |= _evaluated(summary.get("evaluation") or {})
            facts[summary.get("steps", 0)] = known | facts.get(summary.get("steps", 0), {})
            end = summary["status"] if summary.get("status") in DECIDED else None
    return Evidence(
        name=str(path),
        facts=dict(sorted(facts.items())),
        checkpoints={manifest.step: checkpoint for checkpoint, manifest in manifests.items()},
        numeric=numeric,
        settings=_settings(folder / "recipe.yaml"),
        notes=notes + _drifted(path, drift),
        end=end,
    )


def _facts(manifest: layout.Manifest) -> dict[str, Any]:
    chain = manifest.progress.get("chain")
    return {"digest": manifest.digest, **({"chain": chain} if chain else {}), **_evaluated(manifest.metrics)}


def _evaluated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The quantities of an evaluation; non-finite ones are None, as in metrics.jsonl."""
    return {
        f"{EVALUATION}{name}": None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _logged(file: Path) -> dict[int, dict[str, Any]]:
    """Step -> quantity -> value; a line that a kill has cut short is skipped."""
    found: dict[int, dict[str, Any]] = {}
    for text in storage.read_regular(file, MOST_BYTES).split(b"\n") if file.exists() else []:
        try:
            line = pydantic_core.from_json(text)
        except ValueError:
            continue
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            continue
        known = found.setdefault(line["step"], {})
        if line.get("kind") == "step":
            known |= {name: line[name] for name in LOGGED if name in line}
        elif line.get("kind") == "evaluation":
            known |= _evaluated({name: value for name, value in line.items() if name not in NOT_MEASURED})
    return found


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        sections = read(read_file(file), KeyLocations(str(file)))
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not isinstance(sections, dict) or not all(isinstance(section, dict) for section in sections.values()):
        raise ValueError(f"{file.name} has no sections")
    flat = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in flat.items() if name not in NAMES}


def _drifted(path: Path, drift: list[dict[str, Any]]) -> list[str]:
    return [
        f"{path} was resumed after step {each['step']} with another {each['field']}: "
        f"{each['before']!r} before, {each['now']!r} since"
        for each in drift
    ]
