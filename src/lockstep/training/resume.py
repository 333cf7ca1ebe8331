"""Where a run goes on: which checkpoint, whether it belongs to this recipe, and what it brings back."""

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.checkpoint import layout, reader, verify
from lockstep.errors import CheckpointError
from lockstep.runtime.collectives import decided, together
from lockstep.training.state import TrainState


def checkpoint_for(root: Path, resume: str, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint that `--resume auto|never|PATH` means, chosen by rank 0 for all; None to start afresh.

    Raises CheckpointError, on every rank, when there are checkpoints but none can be used as asked.
    """
    choice: Path | None = None
    with together():
        if dist.get_rank() == 0:
            try:
                choice = _choose(root, resume, warn)
            except OSError as error:
                raise CheckpointError(f"cannot use the checkpoints in {root}: {error}") from None
    return decided(choice)


def _choose(root: Path, resume: str, warn: Callable[[str], None]) -> Path | None:
    there = layout.listed(root)
    if resume == "never":
        if there:
            raise CheckpointError(
                f"{root} holds {len(there)} checkpoints, the newest {there[0].name}: --resume never "
                "would overwrite them. Choose another run.name, or go on with --resume auto"
            )
        return None
    if resume == "auto":
        found = verify.newest(root, lambda folder, reason: warn(f"passed over {folder.name}: {reason}"))
        if there and found is None:
            raise CheckpointError(f"none of the {len(there)} checkpoints in {root} is whole; choose another run.name")
        return found
    folder = Path(resume).expanduser().resolve()
    if (folder / "checkpoints").is_dir():  # a run: its newest
        folder = verify.newest(folder / "checkpoints", lambda *_: None) or folder
    if not folder.is_dir():
        raise CheckpointError(
            f"--resume {resume}: there is no such folder; say auto, never, a run, or one of its checkpoints, such as "
            f"{there[0] if there else root / 'step-000000100'}"
        )
    reason = verify.problem(folder)
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
    with together():
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
