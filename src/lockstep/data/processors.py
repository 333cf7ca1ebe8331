"""Processors that turn files into the inputs of a model, and are saved beside it: of images, or of sounds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.base.contracts import Columns, DataSpec
from lockstep.base.errors import DataError
from lockstep.core.host.pretrained_processors import ImageProcessor
from lockstep.data.data_config import AudioSection, DataSection
from lockstep.data.images import ImageReader, Scaling, image_processor_of
from lockstep.data.preparation import Preparation, PreparedReader, needed, preparation_of
from lockstep.data.sounds import SoundReader, sound_reader_of
from lockstep.data.targets import Targets

Processor = ImageProcessor | SoundReader | Preparation
FileReader = ImageReader | SoundReader
"""Turns a file, or its contents, into the input of a model."""


class FileSamples:
    """Files, opened on access, and their targets."""

    remarks: tuple[str, ...] = ()
    """Messages for the user about files that were left out."""

    def __init__(self, paths: Sequence[Path], targets: Targets, reader: FileReader, *, skips: bool = False) -> None:
        self.paths, self.reader, self.labels = paths, reader, targets.values
        self.lengths = reader.lengths(paths, skips=skips)
        self.spec = DataSpec(modality=reader.modality, **reader.spec, **targets.described)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return {COLUMN: m inputs, "label": int64 [m]}. Raises DataError for a damaged file."""
        inputs = [self.reader(self.paths[index], self.place(index)) for index in indices]
        return {self.reader.column: inputs, "label": self.labels[np.asarray(indices, dtype=np.int64)]}

    def place(self, index: int) -> str:
        return str(self.paths[index])


def processor_of(section: DataSection) -> Processor | None:
    """Return the processor that data.image_processor or data.feature_extractor names, or the `prepare` of a user's
    source; None of other sources. Raises DataError."""
    if section.code is not None:
        return preparation_of(section.code)
    return sound_reader_of(section) if isinstance(section, AudioSection) else image_processor_of(section)


def reader_of(spec: DataSpec, processor: Processor | None) -> FileReader | None:
    """Return the reader of files with a processor, else one that scales images to their shape, if there is one. Raises
    DataError where they have to be prepared, and nothing says how."""
    shape = spec.image_shape
    if isinstance(processor, SoundReader):
        return processor
    if isinstance(processor, Preparation):
        return PreparedReader(shape, processor) if shape else None
    if message := needed(spec):
        raise DataError(message)
    fit = processor or (Scaling(shape) if shape else None)
    return ImageReader(fit) if fit else None
