"""A bundle: shards of one step with the weights that they ran on, in one file that needs neither data nor checkpoints.

An archive without compression of safetensors and JSON; of the user's files it holds the hashes.
"""

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from lockstep.base import config, storage
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import DataError
from lockstep.base.model_contracts import MicroBatch
from lockstep.core.modules.module_trace import Line
from lockstep.core.numerics.seeds import seed_of
from lockstep.recipe.components import Components
from lockstep.tools.replay.opened_step import Row, chosen, traced

SUFFIX = ".replay"
ENTRY = re.compile(r"replay\.json|(weights|shard-\d{1,6})\.safetensors")
CLASS_WEIGHTS = "lockstep.class_weights"
"""Name of the weights of the classes among the tensors of the model."""


class ShardFacts(BaseModel):
    """Fields as in MicroBatch."""

    step: int
    shard: int
    indices: tuple[int, ...]
    shards: int
    weights: dict[str, float] | None
    term_counts: dict[str, float]


class BundleFacts(BaseModel):
    recipe: str
    spec: DataSpec
    total_steps: int
    seed: int
    """The seed of training, from which those of step, shard and block follow."""
    shards: list[ShardFacts]
    numeric: dict[str, Any]
    """The numeric recipe, with the sha256 of the user's files, the processor and torch's version."""
    trace: list[Line]
    opened: Row

    def micro_batches(self, folder: Path, device: torch.device) -> list[MicroBatch]:
        """Read the shards of an unpacked bundle."""
        batches = [tensors(folder, f"shard-{each.shard}", device) for each in self.shards]
        return [MicroBatch(batch=batch, **vars(each)) for batch, each in zip(batches, self.shards, strict=True)]


def save(file: Path, parts: Components, micro_batches: Sequence[MicroBatch], *, step: Row, numeric: Any) -> None:
    """Write the shards that were opened. Raises DataError for columns that are no tensors, OSError."""
    kept = {row["shard"] for row in step["shards"]}
    shards = [each for each in chosen(parts.state, micro_batches, None) if each.shard in kept]
    facts = BundleFacts(
        recipe=config.dump(parts.recipe),
        spec=parts.data.train.spec,
        total_steps=parts.total_steps,
        seed=seed_of(parts.recipe.run.seed, "training"),
        shards=[ShardFacts.model_validate(each, from_attributes=True) for each in shards],
        numeric=numeric,
        trace=[line for each in shards for line in traced(parts.model, parts.state, each)],
        opened=step,
    )
    weights = dict(parts.strategy.state())
    if (of_classes := getattr(getattr(parts.model, "objective", None), "class_weights", None)) is not None:
        weights[CLASS_WEIGHTS] = of_classes
    entries = {"weights": weights, **{f"shard-{each.shard}": each.batch for each in shards}}
    try:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("replay.json", facts.model_dump_json())
            for name, each in entries.items():
                archive.writestr(f"{name}.safetensors", _bytes(each))
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def _bytes(found: Mapping[str, Any]) -> bytes:
    if odd := [name for name, value in found.items() if not isinstance(value, Tensor)]:
        raise DataError(f"--save: {odd[0]!r} is no tensor, and a bundle holds nothing else; leave --save out")
    return safetensors.torch.save({name: each.detach().cpu().contiguous().clone() for name, each in found.items()})


def unpack(file: Path, folder: Path) -> BundleFacts:
    """Unpack a bundle into a folder. Raises DataError where it is none."""
    try:
        with storage.regular(file) as opened:
            storage.check_archive(opened, file.stat().st_size)
            with zipfile.ZipFile(opened) as archive:
                if strange := [name for name in archive.namelist() if not ENTRY.fullmatch(name)]:
                    raise ValueError(f"{strange[0]!r} is in it")
                archive.extractall(folder)
        return read(folder)
    except (OSError, ValueError, zipfile.BadZipFile, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file} is no bundle of lockstep replay --save: {reason}") from None


def read(folder: Path) -> BundleFacts:
    """Read the facts of an unpacked bundle."""
    return BundleFacts.model_validate_json(storage.read_regular(folder / "replay.json", storage.MOST_JSON_BYTES))


def tensors(folder: Path, name: str, device: torch.device) -> dict[str, Tensor]:
    """Read the weights and buffers of an unpacked bundle ("weights"), or the columns of a shard ("shard-V")."""
    found: dict[str, Tensor] = safetensors.torch.load_file(folder / f"{name}.safetensors", device=str(device))
    return found
