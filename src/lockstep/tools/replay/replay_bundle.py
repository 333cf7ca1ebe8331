"""A bundle: shards of one step with the weights that they ran on, in one file that needs neither data nor checkpoints.

An archive without compression of safetensors and JSON; of the user's files it holds the hashes.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from lockstep.base import config, storage
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import DataError
from lockstep.base.model_contracts import MicroBatch
from lockstep.checkpoint.layout import Count
from lockstep.core.modules.module_trace import Line
from lockstep.core.numerics.seeds import seed_of
from lockstep.recipe.components import Components
from lockstep.recipe.recipe import MOST_SHARDS
from lockstep.tools.replay.opened_step import chosen, traced

SUFFIX = ".replay"
FACTS, WEIGHTS = "replay.json", "weights"
CLASS_WEIGHTS = "lockstep.class_weights"
"""Name of the weights of the classes among the tensors of the model."""


class ShardFacts(BaseModel):
    """Fields as in MicroBatch."""

    step: Count
    shard: Count
    indices: tuple[int, ...]
    shards: Annotated[int, Field(ge=1, le=MOST_SHARDS)]
    weights: dict[str, float] | None
    term_counts: dict[str, float]


class BundleFacts(BaseModel):
    recipe: str
    spec: DataSpec
    total_steps: Count
    seed: int
    """The seed of training, from which those of step, shard and block follow."""
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Scale of the gradients in fp16."""
    shards: list[ShardFacts]
    numeric: dict[str, Any]
    """The numeric recipe, with the sha256 of the user's files, the processor and torch's version."""
    trace: list[Line]


def save(
    file: Path, parts: Components, micro_batches: Sequence[MicroBatch], *, shard: int | None, numeric: Any
) -> None:
    """Write the shards that are opened. Raises DataError for columns that are no tensors, OSError."""
    shards = chosen(parts.state, micro_batches, shard)
    facts = BundleFacts(
        recipe=config.dump(parts.recipe),
        spec=parts.data.train.spec,
        total_steps=parts.total_steps,
        seed=seed_of(parts.recipe.run.seed, "training"),
        scale=parts.state.precision.scaler.get_scale(),
        shards=[ShardFacts.model_validate(each, from_attributes=True) for each in shards],
        numeric=numeric,
        trace=[line for each in shards for line in traced(parts.model, parts.state, each)],
    )
    weights = dict(parts.strategy.state())
    if (of_classes := getattr(getattr(parts.model, "objective", None), "class_weights", None)) is not None:
        weights[CLASS_WEIGHTS] = of_classes
    entries = {WEIGHTS: weights, **{f"shard-{each.shard}": each.batch for each in shards}}
    content = {FACTS: facts.model_dump_json().encode()}
    content |= {f"{name}.safetensors": _bytes(each) for name, each in entries.items()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, part in content.items():
            archive.writestr(name, part)


def _bytes(found: Mapping[str, Any]) -> bytes:
    if odd := [name for name, value in found.items() if not isinstance(value, Tensor)]:
        raise DataError(f"--save: {odd[0]!r} is no tensor, and a bundle holds nothing else; leave --save out")
    return safetensors.torch.save({name: each.detach().cpu().contiguous().clone() for name, each in found.items()})


@contextmanager
def archive_of(file: Path) -> Iterator[zipfile.ZipFile]:
    """Open a bundle. Raises DataError where it, or what is read of it, is none."""
    try:
        with storage.regular(file) as opened:
            storage.check_archive(opened, file.stat().st_size)
            with zipfile.ZipFile(opened) as archive:
                yield archive
    except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, SafetensorError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        reason = " ".join(text.split())[:200]
        raise DataError(f"{file} is no bundle of lockstep replay --save: {reason}") from None


def facts_of(file: Path) -> BundleFacts:
    """Read all but the tensors. Raises DataError."""
    with archive_of(file) as archive:
        facts = BundleFacts.model_validate_json(archive.read(FACTS))
        if not facts.shards:
            raise ValueError("no shard is in it")
        return facts


def tensors_of(file: Path, name: str) -> dict[str, Tensor]:
    """Read the weights and buffers, or the columns of a shard: "shard-V". Raises DataError."""
    with archive_of(file) as archive:
        found: dict[str, Tensor] = safetensors.torch.load(archive.read(f"{name}.safetensors"))
        return found
