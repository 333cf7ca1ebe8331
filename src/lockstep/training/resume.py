"""Resume a run: choose a checkpoint, check that it fits the config, load it."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint import layout, reader, verify
from lockstep.checkpoint.layout import Count
from lockstep.core.distributed.collectives import broadcast_object, raise_on_all_ranks
from lockstep.training.state import TrainState

SUMS = re.compile(r"data\.(contents|contents_full|classes|date)|.*_imports")
"""Fields of the numeric recipe that are compared where both have them: a checkpoint of an earlier version lacks them,
and so does one of another data.fingerprint."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Best(_Strict):
    best: float | None
    evaluations_since: Count


class _Drift(_Strict):
    step: Count
    field: str
    before: Any
    now: Any


class _Scaler(_Strict):
    scale: Annotated[float, Field(gt=0)]
    growth_factor: Annotated[float, Field(gt=1)]
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]
    growth_interval: Annotated[int, Field(ge=1)]
    growth_tracker: Annotated[int, Field(ge=0, alias="_growth_tracker")]


class _Spikes(_Strict):
    recent: dict[str, list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]] = {}
    last: dict[str, Count] = {}
    found: list[dict[str, float]] = []


class Progress(_Strict):
    """Schema of a manifest's `progress`, which `TrainState.load_state_dict` takes."""

    model_config = ConfigDict(extra="allow")

    step: Count
    skipped: Count
    rate_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    is_stopped: bool = False
    observers: list[Any] = []
    chain: Annotated[str, Field(max_length=128)]
    spikes: _Spikes = _Spikes()
    drift: list[_Drift]
    scaler: _Scaler | Annotated[dict[str, Any], Field(max_length=0)]
    stopping: _Best
    saving: _Best
    parent: dict[str, Any] | None = None


def problem(folder: Path) -> str | None:
    """Return why a checkpoint cannot be resumed from; None if it can. Like verify.problem, plus its progress."""
    if (reason := verify.problem(folder)) is not None:
        return reason
    try:
        manifest = layout.read_manifest(folder)
        progress = Progress.model_validate(manifest.progress)
    except ValidationError as error:
        first = error.errors()[0]
        return f"its progress cannot be used ({'.'.join(map(str, first['loc']))}: {first['msg']})"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    return None if progress.step == manifest.step else f"its progress is one of step {progress.step}"


@dataclass(frozen=True)
class NumericRecipe:
    """Settings that may change bits."""

    values: Mapping[str, Any]
    unset: Collection[str] = ()
    """Names of settings with their default: a checkpoint of an earlier version may lack them."""
    parent: Path | None = None
    """Checkpoint of another run, from which this one goes on while it has none of its own, whatever has changed."""


def resumed(
    state: TrainState,
    root: Path,
    how: str,
    *,
    numeric: NumericRecipe,
    allow_drift: bool,
    warn: Callable[[str], None],
    prepare: Callable[[Path], None] = lambda _: None,
) -> Path | None:
    """Load the checkpoint that `how` (auto, never or a path) selects and return it; None to start from scratch.
    `prepare` is called with it before its tensors are loaded into those of the state.

    "auto" also skips checkpoints whose tensors cannot be read. Raises CheckpointError on every rank.
    """
    unreadable, parent = set[Path](), numeric.parent
    while (folder := _checkpoint(root, how, warn, skip=unreadable, parent=parent)) is not None:
        is_parent = parent is not None and folder.resolve() == parent.resolve()
        try:
            drift = _drift(folder, numeric, allow_drift=allow_drift or is_parent, warn=warn)
            prepare(folder)
            manifest = layout.read_manifest(folder)
            reader.load(folder, state.tensors())
            state.load_state_dict({"rate_factor": 1.0, "is_stopped": False, "spikes": {}, **manifest.progress})
            if is_parent:
                state.parent = {"run": str(folder.parents[1]), "step": manifest.step, "digest": manifest.digest}
            state.drift += [{"step": state.step, "field": name, "before": old, "now": now} for name, old, now in drift]
        except reader.DamagedError as error:
            if how != "auto" or is_parent:
                raise
            warn(str(error))
            unreadable.add(folder)
        else:
            return folder
    return None


def _checkpoint(
    root: Path, how: str, warn: Callable[[str], None], *, skip: Collection[Path], parent: Path | None
) -> Path | None:
    """Return the checkpoint that rank 0 selects for all ranks; None to start from scratch. Raises CheckpointError on
    every rank when there are checkpoints, but none is usable."""
    choice: Path | None = None
    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            try:
                choice = _choose(root, how, warn, skip=skip)
                if choice is None and parent is not None:
                    if (reason := problem(parent)) is not None:
                        raise CheckpointError(f"cannot go on from run.parent={parent}: {reason}")
                    choice = parent
            except OSError as error:
                raise CheckpointError(f"cannot use the checkpoints in {root}: {error}") from None
    return broadcast_object(choice)


def _choose(root: Path, how: str, warn: Callable[[str], None], *, skip: Collection[Path]) -> Path | None:
    checkpoints = layout.listed(root)
    if how == "never":
        if checkpoints:
            raise CheckpointError(
                f"{root} holds {len(checkpoints)} checkpoints, the newest {checkpoints[0].name}: --resume never "
                "would overwrite them. Choose another run.name, or go on with --resume auto"
            )
        return None
    if how == "auto":
        newest = verify.newest(
            root,
            lambda folder, reason: warn(f"passed over {folder.name}: {reason}"),
            problem=lambda folder: "cannot be loaded" if folder in skip else problem(folder),
        )
        if checkpoints and newest is None:
            what = f"none of the {len(checkpoints)} checkpoints in {root} is whole"
            raise CheckpointError(f"{what}; choose another run.name")
        return newest
    folder = Path(how).expanduser().resolve()
    if (folder / "checkpoints").is_dir():  # the folder of a run
        folder = verify.newest(folder / "checkpoints", lambda *_: None, problem=problem) or folder
    if not folder.is_dir():
        what = f"--resume {how}: there is no such folder; say auto, never, a run, or one of its checkpoints"
        raise CheckpointError(f"{what}, such as {checkpoints[0] if checkpoints else root / 'step-000000100'}")
    if (reason := problem(folder)) is not None:
        raise CheckpointError(f"cannot resume from {folder}: {reason}")
    return folder


def set_aside(root: Path, step: int, warn: Callable[[str], None]) -> None:
    """Rename the checkpoints of later steps than the run goes back to, which the next resume would otherwise choose. On
    rank 0 only, once it is certain that the run goes on."""
    for folder in [folder for folder in layout.listed(root) if layout.step_of(folder) > step]:
        renamed = root / f"set-aside-{datetime.now():%Y%m%d-%H%M%S}-{folder.name}"
        folder.rename(renamed)
        warn(f"{folder.name} is newer than where the run goes on; it is kept as {renamed.name}")


def _drift(
    folder: Path, numeric: NumericRecipe, *, allow_drift: bool, warn: Callable[[str], None]
) -> list[tuple[str, Any, Any]]:
    """Return the settings that differ in a checkpoint: name, before, now. Raises CheckpointError unless allowed."""
    known = layout.read_manifest(folder).numeric
    differing = layout.differences(known, numeric.values)
    drift = [each for each in differing if each[0] in known or each[0] not in numeric.unset]
    drift = [each for each in drift if None not in each[1:] or not SUMS.fullmatch(each[0])]
    lines = [layout.described(*each) for each in drift]
    with raise_on_all_ranks():
        if drift and not allow_drift:
            listing = "\n  ".join(lines)
            raise CheckpointError(
                f"{folder} was made with another numeric recipe, so the weights would be no single run's:\n  {listing}"
                "\n  Set these back, start a new run with another run.name, or go on all the same with --allow-drift"
            )
    for line in lines:
        warn(f"numeric recipe changed on resume: {line}")
    return drift
