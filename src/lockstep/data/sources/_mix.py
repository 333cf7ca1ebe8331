"""Several sources as one."""

from lockstep.base.errors import DataError
from lockstep.data.data_config import DataSection, PixelSection
from lockstep.data.dataset import open_source, spread_evenly, stream_of
from lockstep.data.mixture import Joined
from lockstep.data.sources.mix import SHARED, Config


def build(config: Config, split: str) -> Joined:
    """Open all sources. Raises DataError, also where their DataSpecs differ."""
    parts = [open_source(_section(config, each), split) for each in config.sources]
    for number, part in enumerate(parts):
        if stream_of(part) is not None:
            raise DataError(f"source {number} of the mix is a stream, of which no sample can be asked for by number")
    if config.limit is not None and split == "train":
        whole = sum(config.weights)
        parts = [
            spread_evenly(part, max(1, int((config.limit - len(parts)) * weight / whole)))
            for part, weight in zip(parts, config.weights, strict=True)
        ]
    return Joined(parts, [f"source {number} ({each.kind})" for number, each in enumerate(config.sources)])


def _section(config: Config, part: DataSection) -> DataSection:
    """Return a source's settings, with those that belong to the whole mix."""
    is_image = isinstance(part, PixelSection)
    names = [name for name in SHARED if is_image or name != "image_processor"]
    return part.model_copy(update={name: getattr(config, name) for name in names})
