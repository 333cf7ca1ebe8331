"""Settings of Lockstep's own decoder."""

from typing import Self

from pydantic import Field, model_validator

from lockstep.models._model_config import ModelSection


class Config(ModelSection):
    """A decoder that predicts the next token: rotary positions, RMSNorm, gated feed-forward layers."""

    modality = "tokens"
    STARTER = {
        "data": {"kind": "text", "context": 128},
        "train": {"epochs": 5, "global_batch": 32, "micro_batch": 16},
        "optim": {"lr": 4e-3, "weight_decay": 0.1, "beta2": 0.95},
        "schedule": {"shape": "cosine", "warmup": 0.05},
    }

    layers: int = Field(4, ge=1, le=1000)
    """Number of blocks."""
    width: int = Field(128, ge=4, le=2**16)
    """Numbers that represent a token between the blocks."""
    heads: int = Field(4, ge=1, le=1024)
    """Attention heads; they divide the width into parts of an even size."""
    hidden: int | None = Field(None, ge=1, le=2**18)
    """Width inside the feed-forward layers; by default 8/3 of the width, rounded up to a multiple of 32."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the numbers that are set to 0 behind the attention and the feed-forward layer of each block."""
    tied: bool = False
    """Whether the head uses the weights of the embedding: fewer weights, and no `pipeline`."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(f"width={self.width} cannot be cut into heads={self.heads} parts of an even size")
        return self
