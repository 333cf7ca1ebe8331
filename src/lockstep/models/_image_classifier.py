"""Classifiers of images from transformers: load, check, save. m = samples, C x H x W = channels, height, width."""

import torch
from torch import Tensor

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model
from lockstep.core.host.pretrained_processors import ImageProcessor
from lockstep.models._pretrained import NetworkModel, with_new_head
from lockstep.models.image_classifier import Config
from lockstep.models.objectives._choice import TAGS, name_of


class ImageModel(NetworkModel):
    """Scales pixels as the model's image processor does; the processor's sizes are the data's concern."""

    AUTO_CLASS = "AutoModelForImageClassification"
    PROCESSOR = ImageProcessor

    def forward(self, batch: Batch) -> Tensor:
        """batch["image"] uint8 [m, C, H, W] -> outputs [m, K], such as logits of classes."""
        images, dtype = batch["image"], next(self.network.parameters()).dtype
        factors, shifts = (
            torch.stack([torch.full((1, 1), value, dtype=dtype, device=images.device) for value in values])
            for values in self.processor.normalization
        )
        return self.network(pixel_values=images.to(dtype) * factors - shifts).logits


def build(config: Config, spec: DataSpec) -> Model:
    """Load pretrained weights, with a new head for the data's targets, whose names go into the model's config. Raises
    ModelError when the model cannot be loaded, or does not take the data's images."""
    if spec.image_shape is None or name_of(spec) == TAGS:
        raise ModelError("model.kind=image_classifier takes images of one size, with targets for each")
    network, notes = with_new_head(ImageModel.auto_class(spec), config, spec)
    model = ImageModel.of(network.float(), spec, config.name)
    shape = spec.image_shape
    model.tried_out(
        {"image": torch.zeros(1, *shape, dtype=torch.uint8)},
        lambda reason: ModelError(
            f"model.name={config.name} does not take images of {' x '.join(map(str, shape))} (channels x height x "
            f"width): {reason}. Its own image processor gives it others (data.image_processor=auto)"
        ),
    )
    model._lockstep_notes = tuple(notes)
    return model


save, save_config = ImageModel.save, ImageModel.save_config
read_back, from_config = ImageModel.read_back, ImageModel.from_config
