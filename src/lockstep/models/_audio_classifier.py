"""Classifiers of sounds from transformers: load, check, save. m = samples, T = numbers or frames of a sound."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model
from lockstep.core.host.pretrained_processors import FeatureExtractor
from lockstep.models._pretrained import NetworkModel, with_new_head
from lockstep.models.audio_classifier import Config
from lockstep.models.objectives._choice import TAGS, name_of

LAYER_DROPS = ("layerdrop", "encoder_layerdrop")
"""Probability that a layer is skipped in training (A. Fan et al., Reducing Transformer Depth on Demand, 2019)."""


class AudioModel(NetworkModel):
    """Classifier of the features that the model's feature extractor makes of sounds."""

    AUTO_CLASS = "AutoModelForAudioClassification"
    PROCESSOR = FeatureExtractor

    def forward(self, batch: Batch) -> Tensor:
        """Features float [m, T] or [m, T, bands], and the mask int64 [m, T] of extractors that give one -> outputs
        [m, K], such as logits of classes."""
        column = self.processor.column
        inputs = {column: batch[column].to(next(self.network.parameters()).dtype)}
        if f"{column}_mask" in batch:
            inputs["attention_mask"] = batch[f"{column}_mask"]
        return self.network(**inputs).logits


def build(config: Config, spec: DataSpec) -> Model:
    """Load pretrained weights, with a new head for the data's targets, whose names go into the model's config. Raises
    ModelError when the model cannot be loaded, or does not take what its feature extractor gives."""
    if spec.modality != "audio" or name_of(spec) == TAGS:
        raise ModelError("model.kind=audio_classifier takes sounds, with targets for each, such as data.kind=audio")
    network, notes = with_new_head(AudioModel.auto_class(spec), config, spec)
    model = AudioModel.of(network.float(), spec, config.name)
    features = torch.from_numpy(model.processor(np.zeros(model.processor.rate, np.float32)))
    model.tried_out(
        {model.processor.column: features[None]},
        lambda reason: ModelError(
            f"model.name={config.name} does not take what its feature extractor gives, numbers of shape "
            f"{[*features.shape]} for a second: {reason}"
        ),
    )
    if _disable_layer_drop(network):
        notes.append(
            f"{config.name} skips layers at random in training (layerdrop): it is off, as each process runs each block"
        )
    model._lockstep_notes = tuple(notes)
    return model


def _disable_layer_drop(network: Any) -> bool:
    """Turn layerdrop off: FSDP and pipelines need each block in each forward pass -> whether it was on."""
    found = [
        (owner, name)
        for owner in (network.config, *network.modules())
        for name in LAYER_DROPS
        if getattr(owner, name, None)
    ]
    for owner, name in found:
        setattr(owner, name, 0.0)
    return bool(found)


save, save_config = AudioModel.save, AudioModel.save_config
read_back, from_config = AudioModel.read_back, AudioModel.from_config
