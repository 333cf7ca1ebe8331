"""Settings of data.kind=mix: several sources, drawn from by weights."""

from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, create_model, model_validator

from lockstep.base import plugins
from lockstep.base.config import MANY, Kind
from lockstep.base.errors import ConfigError
from lockstep.data.data_config import AudioSection, DataSection, Origin, PixelSection

SHARED = sorted(PixelSection.model_fields.keys() - {"kind", "limit"})
"""Settings that belong to the whole mix."""
PART = "Part_"


@lru_cache
def part(kind: str) -> type[DataSection]:
    """Return the section of a source, with its weight. Raises ConfigError for one that cannot be mixed."""
    if not kind or kind == "mix":
        raise ConfigError("each source of a mix needs a kind of its own, such as files, hub or user")
    section: type[DataSection] = plugins.find("data.sources", kind).Config
    if section.PACKS or issubclass(section, AudioSection):
        raise ConfigError(f"data.kind={kind} cannot be mixed: a mix takes images, texts with labels and your own data")
    fields: dict[str, Any] = {}
    for name in set(SHARED) & section.model_fields.keys():  # they are not written into recipes
        fields[name] = section.model_fields[name].annotation, copy(section.model_fields[name])
        fields[name][1].exclude = True
    weight = Field(1.0, gt=0, description="Its share of an epoch's samples, in relation to those of the others.")
    return create_model(
        f"{PART}{kind}",
        __module__=__name__,
        __base__=section,
        __doc__=section.__doc__,
        weight=(float, weight),
        **fields,
    )


def __getattr__(name: str) -> type[DataSection]:
    """Return the class that `part` makes, for pickle."""
    if not name.startswith(PART):
        raise AttributeError(name)
    return part(name.removeprefix(PART))


class Config(PixelSection):
    """Several sources with samples of the same kind; each epoch draws from them by weights."""

    STARTER = {"data": {"sources": [{"kind": "digits", "weight": 2}, {"kind": "digits", "limit": 500}]}}
    incidental = PixelSection.incidental | {"sources"}

    sources: tuple[Annotated[Any, Kind("", part, lambda: plugins.names("data.sources"))], ...] = Field(min_length=1)
    """The sources, such as [{kind: files, train: a.csv, weight: 2}, {kind: files, train: b.csv}]; a weight is 1 unless
    it is given. The test split holds all of theirs."""
    samples_per_epoch: int | None = Field(None, ge=1, le=1000 * MANY)
    """Samples of an epoch; by default so many that each source has been seen once: those with a larger share than their
    size repeat."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for number, each in enumerate(self.sources):
            for name in SHARED:
                if name in each.model_fields_set:
                    raise ValueError(f"{name} belongs to the whole mix: set data.{name}, not that of source {number}")
        if self.limit is not None and self.limit < len(self.sources):
            raise ValueError(f"limit={self.limit} leaves nothing of some of the {len(self.sources)} sources")
        if len({each.modality for each in self.sources} - {"any"}) > 1:
            kinds = ", ".join(f"{each.kind} gives {each.modality}" for each in self.sources)
            raise ValueError(f"the sources give samples of different kinds ({kinds}): mix those of one")
        if len({each.code for each in self.sources} - {None}) > 1:
            raise ValueError("the sources name several Python files: put all into one, and tell them apart by options")
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(each.weight for each in self.sources)

    @property
    def modality(self) -> str:  # type: ignore[override]
        """Modality of the first source that has one."""
        return next((each.modality for each in self.sources if each.modality != "any"), "any")

    @property
    def objective(self) -> str:  # type: ignore[override]
        found = {str(each.objective) for each in self.sources}
        return found.pop() if len(found) == 1 else "auto"

    @property
    def table_columns(self) -> tuple[str, str]:
        return tuple(self.sources[0].table_columns)

    @property
    def code(self) -> Path | None:
        return next((each.code for each in self.sources if each.code is not None), None)

    def origin(self) -> Origin | None:
        found = [origin for each in self.sources if (origin := each.origin()) is not None]
        names = list(dict.fromkeys(origin.name for origin in found))
        return Origin(name=" and ".join(names)) if names else None

    def numeric_settings(self) -> dict[str, Any]:
        """Return the settings, with the numeric ones of each source."""
        parts = [each.model_dump(mode="json", exclude=set(each.incidental)) for each in self.sources]
        return super().numeric_settings() | {"sources": parts}
