"""Any transformers model that classifies images, by hub name or local folder: ViT, ConvNeXt, ResNet, Swin, ..."""

from lockstep.models._model_config import HubName, PretrainedSection


class Config(PretrainedSection):
    """A pretrained image model (AutoModelForImageClassification) with a new head on top."""

    modality = "image"
    HAS_NEW_HEAD = True
    OWN = "image_processor"
    STARTER = {
        "data": {"kind": "files", "train": "data/images"},
        "train": {"epochs": 3, "global_batch": 32, "micro_batch": 8},
        "optim": {"lr": 1e-4},
        "schedule": {"shape": "cosine", "warmup": 0.06},
    }

    name: HubName = "google/vit-base-patch16-224"
    """A name on the Hugging Face hub, or a local folder (here or in models/) with a saved model and its image
    processor, through which images of any size pass."""
