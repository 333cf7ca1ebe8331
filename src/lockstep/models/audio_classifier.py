"""Any transformers model that classifies sounds, by hub name or local folder: Wav2Vec2, HuBERT, AST, ..."""

from lockstep.models._model_config import HubName, PretrainedSection


class Config(PretrainedSection):
    """A pretrained model of speech or other sounds (AutoModelForAudioClassification) with a new head on top."""

    modality = "audio"
    HAS_NEW_HEAD = True
    OWN = "feature_extractor"
    STARTER = {
        "data": {"kind": "audio", "train": "data/sounds"},
        "train": {"epochs": 5, "global_batch": 32, "micro_batch": 8},
        "optim": {"lr": 3e-5},
        "schedule": {"shape": "cosine", "warmup": 0.1},
    }

    name: HubName = "facebook/wav2vec2-base"
    """A name on the Hugging Face hub, or a local folder (here or in models/) with a saved model and its feature
    extractor, through which sounds of any sampling rate pass."""
