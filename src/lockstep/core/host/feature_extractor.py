"""Feature extractors of transformers: they turn a sound into the numbers that a model takes."""

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base import storage
from lockstep.base.errors import DataError
from lockstep.core.host.hub_access import hub_answers

PROBE_SECONDS = (0.5, 1)
"""Of silence: an extractor that gives the same shape for both makes all sounds equally long."""


class FeatureExtractor:
    """What a model's feature extractor makes of a sound, and how that is padded.

    Raises DataError where it cannot be loaded, or is none of sounds.
    """

    def __init__(self, name: str) -> None:
        """`name`: a name on the hub, or a folder."""
        from transformers import AutoFeatureExtractor

        origin = {"local_files_only": Path(name).is_dir() or not hub_answers(), "trust_remote_code": False}
        try:
            storage.check_files(Path(name))
            self.extractor: Any = AutoFeatureExtractor.from_pretrained(name, **origin)
            self.rate = int(self.extractor.sampling_rate)
            self.column = str(self.extractor.model_input_names[0])
            probes = [self._answer(np.zeros(int(self.rate * each), np.float32)) for each in PROBE_SECONDS]
        except Exception as error:  # a damaged file can raise anything inside the libraries
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise DataError(
                f"cannot load the feature extractor of {name}: {reason}; save it beside the model, with "
                "feature_extractor.save_pretrained(FOLDER)"
            ) from error
        self.has_mask = all("attention_mask" in probe for probe in probes)
        self.padding = float(getattr(self.extractor, "padding_value", 0.0))
        shapes = {probe[self.column][0].shape for probe in probes}
        self.is_fixed = len(shapes) == 1
        """Whether all sounds get the same length."""

    def __call__(self, wave: np.ndarray) -> np.ndarray:
        """A sound float32 [T] at the model's rate -> features, float32 [T] or [frames, bands]."""
        return np.asarray(self._answer(wave)[self.column][0], dtype=np.float32)

    def _answer(self, wave: np.ndarray) -> Any:
        return self.extractor(wave, sampling_rate=self.rate, return_tensors="np")

    def save(self, folder: Path) -> None:
        """Write its file, beside the model's."""
        self.extractor.save_pretrained(folder)


class Waves:
    """In place of a feature extractor: the sound itself."""

    rate, column, has_mask, padding, is_fixed = 16_000, "input_values", True, 0.0, False

    def __call__(self, wave: np.ndarray) -> np.ndarray:
        return wave

    def save(self, folder: Path) -> None:
        """There is no file."""
