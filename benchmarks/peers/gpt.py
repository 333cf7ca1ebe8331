"""A language model over bytes, and the text it learns: 10 million weights and sequences of 256, or other sizes."""

from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


class Size(NamedTuple):
    length: int
    width: int
    heads: int
    layers: int


SIZES = {"gpt": Size(256, 320, 5, 8), "gpt-100m": Size(1024, 768, 12, 14), "gpt-tiny": Size(32, 32, 2, 2)}


def sequences(size: Size, samples: int) -> np.ndarray:
    """Python's own help texts as bytes, uint8 [samples, length + 1], evenly spread."""
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
    starts = np.linspace(0, len(text) - size.length - 1, samples).astype(np.int64)
    return text[starts[:, None] + np.arange(size.length + 1)]


class Layer(nn.Module):
    """Pre-norm transformer layer, [m, T, width] -> [m, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        m, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(m, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(m, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes int64 [m, T] -> logits of the next byte [m, T, BYTES]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, BYTES, bias=False)

    def forward(self, batch: Mapping[str, Tensor] | Tensor) -> Tensor:
        tokens = batch if isinstance(batch, Tensor) else batch["tokens"][:, :-1].long()
        x = self.token(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
