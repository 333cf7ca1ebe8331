"""Settings of data.kind=audio: folders of sound files."""

from lockstep.data.data_config import AudioSection, OwnFilesSection


class Config(AudioSection, OwnFilesSection):
    """Your own sound files, FOLDER/CLASS/*.wav (or .flac, .ogg, .mp3), of any length and sampling rate."""

    STARTER = {"data": {"train": "data/sounds"}}
