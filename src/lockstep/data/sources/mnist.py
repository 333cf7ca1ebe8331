"""Settings of MNIST."""

from pathlib import Path

from lockstep.base.remote_path import DataPath
from lockstep.data.data_config import Origin, PixelSection


class Config(PixelSection):
    """MNIST: handwritten digits, grey, 28x28, ten classes."""

    modality = "image"
    objective = "classification"
    STARTER = {
        "train": {"epochs": 5, "global_batch": 128, "micro_batch": 64},
        "optim": {"lr": 2e-3},
        "schedule": {"shape": "cosine", "warmup": 0.05},
    }

    root: DataPath = Path("data")
    """Folder with the four IDX files, .gz or not, or with a subfolder mnist that has them; else they are downloaded."""

    def origin(self) -> Origin:
        return Origin(name="MNIST", hub="ylecun/mnist")
