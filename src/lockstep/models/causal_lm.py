"""Any transformers model that continues texts, by hub name or local folder: GPT-2, Llama, Qwen, Mistral, ..."""

from typing import Literal

from pydantic import field_validator

from lockstep.models._model_config import HubName, TokensSection


class Config(TokensSection):
    """A causal language model (AutoModelForCausalLM), trained further or from scratch."""

    modality = "tokens"
    OWN = "tokenizer"
    STARTER = {
        "train": {"epochs": 1, "global_batch": 32, "micro_batch": 4},
        "optim": {"lr": 5e-5},
        "schedule": {"shape": "cosine", "warmup": 0.05},
    }

    name: HubName = "openai-community/gpt2"
    """A name on the Hugging Face hub, or a local folder (here or in models/) with a saved model. Its tokenizer is that
    of the data, unless data.tokenizer names another."""
    from_config: bool = False
    """Whether to start with random weights, of the sizes in the model's config.json: no weights are read, and the data
    may have any tokenizer."""
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    """Implementation of attention: eager, plain matrix products; sdpa, PyTorch's fused one; auto: what transformers
    chooses."""

    @property
    def PRETRAINED(self) -> bool:  # type: ignore[override]
        """Whether its weights come from a checkpoint."""
        return not self.from_config

    @field_validator("objective")
    @classmethod
    def _check_causal(cls, name: str) -> str:
        if name not in ("auto", "causal_lm"):
            raise ValueError(f"model.kind=causal_lm predicts the next token: set causal_lm or auto, not {name}")
        return name
