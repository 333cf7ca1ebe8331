"""Decode sound files of any sampling rate into the inputs of a model. T = numbers of a sound, one per 1 / rate s."""

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base import plugins
from lockstep.base.errors import DataError
from lockstep.core.host.pretrained_processors import FeatureExtractor, Waves
from lockstep.data.data_config import AUTO, NO_PROCESSOR, AudioSection

FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
"""Formats that are read, by libsndfile's names; it could read others."""
RATES = (1_000, 768_000)
"""Lowest and highest sampling rate, in Hz: the filter of a resampling grows with the rate."""
MAX_NUMBERS = 64_000_000
"""Limit per sound, over all channels: a small file may decompress to gigabytes."""
MIN_SECONDS = 0.25
"""Shorter sounds are followed by silence: a model takes nothing from less than a window of 25 ms, and the spans of
SpecAugment are 0.2 s long."""
SoundFile = Path | bytes
"""Path or contents of a sound file."""


class TooLong(DataError):
    """A sound of more than MAX_NUMBERS numbers."""


class SoundReader:
    """Turns a sound file into a model's input: one channel, at the model's rate, cut, through its feature extractor."""

    modality, noun = "audio", "a sound"

    def __init__(self, extractor: FeatureExtractor | Waves, seconds: float) -> None:
        """Raises MissingExtra without the packages that decode."""
        plugins.require("audio", "soundfile", "scipy.signal", what="a sound file")
        self.extractor, self.seconds = extractor, seconds
        self.column = extractor.column
        self.spec: dict[str, Any] = {
            "masks": (self.column,) if extractor.has_mask else (),
            "pad": {self.column: extractor.padding} if extractor.padding else {},
        }
        """Fields of DataSpec, for features of different lengths in a batch."""

    def __call__(self, file: Any, where: str, *, formats: tuple[str, ...] | None = None) -> np.ndarray:
        """Return the features of a sound file, float32 [T] or [frames, bands]. Raises DataError."""
        from scipy.signal import resample_poly

        with _opened(file, where, formats or FORMATS) as opened:
            wave = _read(opened, math.ceil(self.seconds * opened.samplerate), where)
            common = math.gcd(self.extractor.rate, opened.samplerate)
            up, down = self.extractor.rate // common, opened.samplerate // common
        if up != down:
            wave = resample_poly(wave, up, down).astype(np.float32)
        length = self._length(len(wave))
        return self.extractor(np.pad(wave[:length], (0, max(0, length - len(wave)))))

    def blank(self) -> np.ndarray:
        """Return the features of a second of silence."""
        return self.extractor(np.zeros(self._length(self.extractor.rate), np.float32))

    def lengths(self, files: Sequence[Path], *, skips: bool) -> np.ndarray | None:
        """Return T of each file, int64 [N], from its header; None where all get the same. A file that cannot be read
        has the length 0 if such are skipped, else DataError is raised."""
        if self.extractor.is_fixed:
            return None
        lengths = np.zeros(len(files), np.int64)
        for number, file in enumerate(files):
            try:
                with _opened(file, str(file)) as opened:
                    lengths[number] = self._length(-(-opened.frames * self.extractor.rate // opened.samplerate))
            except DataError:
                if not skips:
                    raise
        return lengths

    def save(self, folder: Path) -> None:
        self.extractor.save(folder)

    def _length(self, length: int) -> int:
        """Return the length that a sound is cut or padded to."""
        rate = self.extractor.rate
        return max(min(length, math.ceil(self.seconds * rate)), math.ceil(MIN_SECONDS * rate))


def sound_reader_of(section: AudioSection) -> SoundReader:
    """Return the reader with the feature extractor that data.feature_extractor names. Raises DataError."""
    name = section.feature_extractor
    return SoundReader(Waves() if name in (AUTO, NO_PROCESSOR) else FeatureExtractor(name), section.seconds)


def tone(pitch: float, *, seconds: float = MIN_SECONDS, rate: int = 8_000) -> bytes:
    """Return a WAV file of a pure tone, for an example."""
    import soundfile

    file, times = BytesIO(), np.arange(int(seconds * rate)) / rate
    soundfile.write(file, 0.5 * np.sin(2 * np.pi * pitch * times), rate, format="WAV")
    return file.getvalue()


def _opened(file: SoundFile, where: str, formats: tuple[str, ...] = FORMATS) -> Any:
    """Open a sound file as a soundfile.SoundFile, which reads its header. Raises DataError."""
    import soundfile

    if isinstance(file, Path) and not file.is_file():  # opening a pipe would block forever
        raise DataError(f"{where} is no file: remove it")
    try:
        opened = soundfile.SoundFile(BytesIO(file) if isinstance(file, bytes) else file)
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        reason = getattr(error, "error_string", None) or str(error)
        raise DataError(f"{where} cannot be read as a sound ({reason.rstrip('.')}): replace or remove it") from error
    what = f"is {opened.format}" if opened.format not in formats else ""
    if not RATES[0] <= opened.samplerate <= RATES[1]:
        what = f"has a sampling rate of {opened.samplerate:,} Hz"
    if what:
        opened.close()
        raise DataError(f"{where} {what}: what is read is {', '.join(formats)}, with {RATES[0]:,} to {RATES[1]:,} Hz")
    return opened


def _read(opened: Any, most: int, where: str) -> np.ndarray:
    """Return the first `most` frames, the mean of all channels, float32 [T]."""
    import soundfile

    frames = min(opened.frames, most)
    if frames * opened.channels > MAX_NUMBERS:
        raise TooLong(
            f"{where} has {opened.channels} channels and {frames:,} numbers of each, more than {MAX_NUMBERS:,} in all"
        )
    try:
        wave = opened.read(frames, dtype="float32", always_2d=True).mean(axis=1)
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(f"{where} cannot be read as a sound ({error}): replace or remove it") from error
    if not len(wave):
        raise DataError(f"{where} is empty: remove it")
    if not np.isfinite(wave).all():
        raise DataError(f"{where} holds numbers that are not finite: replace or remove it")
    return wave
