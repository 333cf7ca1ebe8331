"""Where a run goes on: which checkpoint, whether it belongs to this recipe, and what it brings back."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Self

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lockstep.base.errors import CheckpointError
from lockstep.checkpoint import layout, reader, verify
from lockstep.checkpoint.layout import Count
from lockstep.core.distributed.collectives import broadcast_object, raise_on_all_ranks
from lockstep.training.state import StepRecord, TrainState


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Record(_Strict):
    best: float | None
    evaluations_since: Count

    @model_validator(mode="after")
    def _is_a_record(self) -> Self:
        if unknown := (self.model_extra or {}).keys() - {field.name for field in fields(StepRecord)}:
            raise ValueError(f"there is no {min(unknown)!r} in it")
        return self


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


class _Nothing(_Strict):
    model_config = ConfigDict(extra="forbid")


class Progress(_Strict):
    """What `TrainState.load_state_dict` takes, as it has to stand in a manifest."""

    step: Count
    skipped: Count
    chain: Annotated[str, Field(max_length=128)]
    drift: list[_Drift]
    scaler: _Nothing | _Scaler
    stopping: _Record
    saving: _Record


def problem(folder: Path) -> str | None:
    """What keeps a checkpoint from being resumed, in a few words: as verify.problem, and its progress."""
    if (reason := verify.problem(folder)) is not None:
        return reason
    try:
        manifest = layout.read_manifest(folder)
        progress = Progress.model_validate(manifest.progress)
    except ValidationError as error:
        first = error.errors()[0]
        return f"its progress cannot be used ({'.'.join(str(part) for part in first['loc'])}: {first['msg']})"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    return None if progress.step == manifest.step else f"its progress is one of step {progress.step}"


def resumed(
    state: TrainState,
    root: Path,
    how: str,
    *,
    numeric: Mapping[str, Any],
    allow_drift: bool,
    warn: Callable[[str], None],
) -> Path | None:
    """Bring a state back from the checkpoint that `how` means -> that one; None to start afresh. With "auto" one whose
    tensors cannot be read is passed over as well.

    Raises CheckpointError, on every rank.
    """
    unreadable: set[Path] = set()
    while (found := checkpoint_for(root, how, warn, but=unreadable)) is not None:
        try:
            resume(state, found, numeric, allow_drift=allow_drift, warn=warn)
        except reader.DamagedError as error:
            if how != "auto":
                raise
            warn(f"{error}")
            unreadable.add(found)
        else:
            return found
    return None


def checkpoint_for(root: Path, resume: str, warn: Callable[[str], None], *, but: Collection[Path] = ()) -> Path | None:
    """The checkpoint that `--resume auto|never|PATH` means, chosen by rank 0 for all, for "auto" none of `but`; None to
    start afresh.

    Raises CheckpointError, on every rank, when there are checkpoints but none can be used as asked.
    """
    choice: Path | None = None
    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            try:
                choice = _choose(root, resume, warn, but=but)
            except OSError as error:
                raise CheckpointError(f"cannot use the checkpoints in {root}: {error}") from None
    return broadcast_object(choice)


def _choose(root: Path, resume: str, warn: Callable[[str], None], *, but: Collection[Path]) -> Path | None:
    there = layout.listed(root)
    if resume == "never":
        if there:
            raise CheckpointError(
                f"{root} holds {len(there)} checkpoints, the newest {there[0].name}: --resume never "
                "would overwrite them. Choose another run.name, or go on with --resume auto"
            )
        return None
    if resume == "auto":
        found = verify.newest(
            root,
            lambda folder, reason: warn(f"passed over {folder.name}: {reason}"),
            problem=lambda folder: "cannot be loaded" if folder in but else problem(folder),
        )
        if there and found is None:
            raise CheckpointError(f"none of the {len(there)} checkpoints in {root} is whole; choose another run.name")
        return found
    folder = Path(resume).expanduser().resolve()
    if (folder / "checkpoints").is_dir():  # a run: its newest
        folder = verify.newest(folder / "checkpoints", lambda *_: None, problem=problem) or folder
    if not folder.is_dir():
        raise CheckpointError(
            f"--resume {resume}: there is no such folder; say auto, never, a run, or one of its checkpoints, such as "
            f"{there[0] if there else root / 'step-000000100'}"
        )
    reason = problem(folder)
    if reason is not None:
        raise CheckpointError(f"cannot resume from {folder}: {reason}")
    return folder


def set_aside(root: Path, step: int, warn: Callable[[str], None]) -> None:
    """Checkpoints of later steps than a run goes back to get another name, or the next resume would take them.

    For rank 0 alone, and only once the run is sure to go on.
    """
    for folder in [folder for folder in layout.listed(root) if layout.step_of(folder) > step]:
        kept = root / f"set-aside-{datetime.now():%Y%m%d-%H%M%S}-{folder.name}"
        folder.rename(kept)
        warn(f"{folder.name} is newer than where the run goes on; it is kept as {kept.name}")


def resume(
    state: TrainState,
    folder: Path,
    numeric: Mapping[str, Any],
    *,
    allow_drift: bool,
    warn: Callable[[str], None],
) -> None:
    """Bring a state back from a checkpoint.

    Raises CheckpointError when its numeric recipe is another one, field by field, unless drift is allowed.
    """
    manifest = layout.read_manifest(folder)
    drift = layout.differences(manifest.numeric, numeric)
    lines = [f"{name}: {before!r} in the checkpoint, {now!r} now" for name, before, now in drift]
    with raise_on_all_ranks():
        if drift and not allow_drift:
            listing = "\n  ".join(lines)
            raise CheckpointError(
                f"{folder} was made with another numeric recipe, so the weights would be no single run's:\n  {listing}"
                "\n  Set these back, start a new run with another run.name, or go on all the same with --allow-drift"
            )
    for line in lines:
        warn(f"numeric recipe changed on resume: {line}")
    reader.load(folder, state.tensors())
    state.load_state_dict(dict(manifest.progress))
    state.drift += [{"step": state.step, "field": name, "before": before, "now": now} for name, before, now in drift]
