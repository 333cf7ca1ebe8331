"""The two-convolution network of the MNIST examples, for images of any size from 8x8 up."""

from pydantic import Field

from lockstep.models._model_config import ModelSection


class Config(ModelSection):
    """Two 3x3 convolutions (32 and 64 channels), max-pooling, two fully connected layers with dropout."""

    modality = "image"

    mean: float = 0.1307
    """Grey value that becomes 0, on a scale of 0 to 1 (MNIST's own mean)."""
    std: float = Field(0.3081, gt=0)
    """Grey values that become 1 above the mean (MNIST's own standard deviation)."""
