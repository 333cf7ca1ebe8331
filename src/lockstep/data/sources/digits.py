"""Settings of the bundled handwritten digits."""

from lockstep.data.data_config import Origin, PixelSection


class Config(PixelSection):
    """scikit-learn's bundled handwritten digits: 1,442 training and 355 test images of 8x8, ten classes."""

    modality = "image"
    objective = "classification"
    STARTER = {
        "train": {"epochs": 20, "global_batch": 64, "micro_batch": 16},
        "optim": {"lr": 3e-3},
        "schedule": {"shape": "cosine", "warmup": 0.05},
    }

    def origin(self) -> Origin:
        return Origin(name="Optical Recognition of Handwritten Digits (UCI, as in scikit-learn)")
