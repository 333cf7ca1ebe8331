"""The user's sounds, in one folder per class."""

from functools import partial

from lockstep.data.own_files import read_class_folders, split_of
from lockstep.data.processors import FileSamples
from lockstep.data.sounds import sound_reader_of
from lockstep.data.sources.audio import Config
from lockstep.data.targets import COLUMNS


def build(config: Config, split: str) -> FileSamples:
    """List the "train" or "test" split; the files are decoded when a micro-batch is fetched. Raises DataError for
    missing folders and, unless they are skipped, files that cannot be read."""
    read = partial(read_class_folders, modality="audio")
    found = split_of(config, split, column=COLUMNS["class"], read=read)
    source = FileSamples(found.samples, found.targets, sound_reader_of(config), skips=config.skips)
    source.remarks = found.remarks
    return source
