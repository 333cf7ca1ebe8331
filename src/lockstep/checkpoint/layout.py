"""The files of a checkpoint: its folder, and the manifest, without which it does not count as one."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic_core
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from lockstep.base import storage
from lockstep.base.config import MANY, Section
from lockstep.base.remote_path import RemoteFolder
from lockstep.checkpoint.metric_modes import Mode, without_sign

MANIFEST = "manifest.json"
MOST_BYTES = 8 << 20
MOST_LINKS = 1000
"""Length limit of a hash chain in a manifest: the last checkpoints of the run."""
Count = Annotated[int, Field(ge=0, le=2**53)]
FileName = Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=255)]
"""Name of a file in the checkpoint's own folder."""


class CheckpointSection(Section):
    """Schedule, number and copies of the checkpoints that keep the run's state on disk."""

    every_steps: int | None = Field(None, ge=1, le=MANY)
    """Save every so many steps; the last step is always saved."""
    every_minutes: float | None = Field(10.0, gt=0, le=MANY)
    """Save when so many minutes have passed since the last save (by rank 0's clock)."""
    keep: int = Field(3, ge=1, le=MANY)
    """How many of the newest checkpoints stay."""
    keep_every_hours: float | None = Field(None, gt=0, le=MANY)
    """Also keep one checkpoint for every so many hours of the run, from its first on, to go back to."""
    best: str | None = None
    """Also keep the best checkpoint by this metric of the evaluation, such as accuracy, f1 or loss; it is the one
    that is evaluated and exported."""
    mode: Mode = "auto"
    """Whether smaller (min) or larger (max) values of `best` are better; best=-nll and best=+score say so, too. auto:
    as the metric or its name says; where that leaves doubt, the run does not start."""
    mirror: RemoteFolder | None = None
    """Also copy the checkpoints to an object store, beside the training: s3://bucket/runs, where the run gets a folder
    of its name. A run that has none on disk, or older ones, resumes from there (extra `remote` for s3://)."""

    @model_validator(mode="before")
    @classmethod
    def _takes_the_sign(cls, section: Any) -> Any:
        return without_sign(section, "best", "mode")


@dataclass(frozen=True)
class Link:
    """One checkpoint in the hash chain of a run: no earlier one can be exchanged without all that follow."""

    step: Count
    digest: str
    """Digest of the weights."""
    sha256: str
    """Hash of the manifest, which names the hashes of the files, without this chain."""
    link: str
    """Hash of the link before it, and of these."""

    def follows(self, before: str) -> bool:
        return self.link == _sha256([before, self.step, self.digest, self.sha256])


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint; written last, so that its presence means that the checkpoint is complete."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    step: Count
    """Number of finished steps."""
    epoch: Count
    world_size: Annotated[int, Field(ge=1, le=2**31)]
    saved_at: float
    """Time at which its state was copied, in seconds since 1970, by rank 0's clock."""
    numeric: Mapping[str, Any]
    """The numeric recipe: everything that may change bits."""
    progress: Mapping[str, Any]
    """Small state besides tensors: chain, drift, scaler, best so far, patience."""
    digest: str = ""
    """sha256 over the weights, as of core/numerics/digest.py; the writer fills it in."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The evaluation at this step, if there was one."""
    files: Mapping[FileName, tuple[Count, str]] = field(default_factory=dict)
    """File name -> (size in bytes, sha256)."""
    checkpoints: tuple[Link, ...] = ()
    """Hash chain of the run up to this checkpoint, at most MOST_LINKS; empty in one of an earlier version."""

    def text(self) -> str:
        """Return the manifest as JSON, with a sha256 of itself."""
        return _with_checksum(asdict(self))

    def after(self, earlier: Sequence[Link]) -> "Manifest":
        """Return the manifest as the next one in the chain of these."""
        linked = (self.step, self.digest, _own_sha256(asdict(self)))
        link = _sha256([earlier[-1].link if earlier else "", *linked])
        return replace(self, checkpoints=(*earlier[1 - MOST_LINKS :], Link(*linked, link)))


def chain_of(root: Path, step: int) -> tuple[Link, ...]:
    """Return the chain of the newest readable checkpoint up to a step."""
    for folder in listed(root):
        with suppress(OSError, ValueError):
            if step_of(folder) <= step:
                return read_manifest(folder).checkpoints
    return ()


def is_linked(folder: Path) -> bool:
    """Return whether the manifest of a checkpoint is the one that its chain ends with."""
    body = pydantic_core.from_json(storage.read_regular(folder / MANIFEST, MOST_BYTES))
    return not body.get("checkpoints") or body["checkpoints"][-1]["sha256"] == _own_sha256(body)


def broken_link(chain: Sequence[Link]) -> Link | None:
    """Return the first link that does not follow from the one before it. The first one follows from nothing, unless
    those before it were dropped."""
    if chain and len(chain) < MOST_LINKS and not chain[0].follows(""):
        return chain[0]
    return next((each for before, each in pairwise(chain) if not each.follows(before.link)), None)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """List the fields of two numeric recipes that differ, in the order of their names: (name, value, other value)."""
    pairs = [(name, one.get(name), other.get(name)) for name in sorted({*one, *other})]
    return [pair for pair in pairs if pair[1] != pair[2]]


def described(name: str, before: Any, now: Any) -> str:
    """Describe a field of two numeric recipes that differs, in one line."""
    if name.startswith("data.contents"):
        return f"{name}: the training samples, their labels or their order have changed"
    if name.endswith("_sha256"):
        return f"{name.removesuffix('_sha256')}: the code in this file has changed"
    if name.endswith("_imports") and isinstance(before, dict) and isinstance(now, dict):
        files = ", ".join(file for file, _, _ in differences(before, now))
        return f"{name.removesuffix('_imports')}: what this file imports has changed ({files})"
    return f"{name}: {before!r} in the checkpoint, {now!r} now"


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, such as step-000000123."""
    return root / f"step-{step:09}"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises OSError or ValueError."""
    text = storage.read_regular(folder / MANIFEST, MOST_BYTES)
    body = pydantic_core.from_json(text)  # json.loads overflows the stack on deep nesting
    if not isinstance(body, dict):
        raise ValueError("the manifest is no section")
    body.pop("sha256", None)
    if _with_checksum(body).encode() != text:
        raise ValueError("the manifest has been changed (its sha256 differs)")
    try:
        manifest: Manifest = _schema().validate_json(json.dumps(body), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([".".join(str(part) for part in first["loc"]), first["msg"]])
        raise ValueError(f"the manifest has other fields ({reason})") from None
    if folder.name.startswith("step-") and folder.name[5:].isdecimal() and step_of(folder) != manifest.step:
        raise ValueError(f"the manifest is one of step {manifest.step}")
    return manifest


def _with_checksum(body: dict[str, Any]) -> str:
    return json.dumps({**body, "sha256": _sha256(body)}, indent=1)


def _own_sha256(body: Mapping[str, Any]) -> str:
    return _sha256({name: value for name, value in body.items() if name not in ("checkpoints", "sha256")})


def _sha256(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@cache
def _schema() -> TypeAdapter[Any]:
    return TypeAdapter(Manifest)


def step_of(folder: Path) -> int:
    return int(folder.name[5:])


def listed(root: Path) -> list[Path]:
    """List the folders of finished checkpoints, newest first."""
    folders = [f for f in root.glob("step-*") if f.name[5:].isdecimal() and (f / MANIFEST).is_file()]
    return sorted(folders, key=step_of, reverse=True)
