"""A golden file: the trace and the numbers of the first steps of a recipe; hashes only, no data and no weights."""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.observe.run_lines import Name, Step

Label = Annotated[str, Field(max_length=2000)]


class GoldenLine(BaseModel):
    """A line of module_trace.Trace."""

    kind: Literal["weights", "batch", "call", "gradient", "sum"]
    step: Step
    shard: Step = 0
    name: Label = ""
    inputs: Name = ""
    hash: Name = ""
    samples: list[int] = []
    columns: dict[Label, Name] = {}
    tensors: dict[Label, Name] = {}


class Golden(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    kind: Literal["lockstep gate"]
    version: Literal[1]
    lockstep: Name
    config: Label = ""
    overrides: list[Label] = []
    folder: Label = ""
    """The working folder at that time, seen from the file's."""
    numeric: dict[Name, Any] = Field(max_length=1000)
    """Settings, versions, processor, hashes of the user's files; see recipe.numeric_recipe."""
    digest: Name | None
    chain: list[Name | None] = Field(min_length=1, max_length=1000)
    numbers: list[dict[Name, float | None]]
    """Loss, gradient norm and learning rate of each step; none after the last."""
    lines: list[GoldenLine]
    modules: dict[str, str] = Field({}, exclude=True)
    """Descriptions of the modules of a run that has just been made."""
    checksum: Name = ""

    def sealed(self) -> Self:
        """Return it with the checksum of everything else."""
        content = self.model_dump_json(exclude={"checksum"})
        return self.model_copy(update={"checksum": hashlib.sha256(content.encode()).hexdigest()})

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.checksum and self != self.sealed():
            raise ValueError("it is not as it was written")
        return self


def read(path: Path) -> Golden:
    """Read a golden file. Raises ConfigError."""
    try:
        return Golden.model_validate_json(storage.read_regular(path, storage.MOST_JSON_BYTES))
    except OSError as error:
        reason = str(error.strerror)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = ": ".join([*map(str, first["loc"][:3]), first["msg"]])
    what = f"{path} is no golden file, or a damaged one ({reason})"
    to = path if path.suffix == ".json" and not path.exists() else path.parent / "golden.json"
    raise ConfigError(f"{what}; record one by `lockstep gate CONFIG --record {to}`")
