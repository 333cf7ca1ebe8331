"""A small language model over bytes, and the text it learns: 10 million weights, sequences of 256."""

from collections.abc import Mapping
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, WIDTH, HEADS, LAYERS, BYTES = 256, 320, 5, 8, 256


def sequences(samples: int) -> np.ndarray:
    """Python's own help texts as bytes, uint8 [samples, LENGTH + 1], evenly spread."""
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
    starts = np.linspace(0, len(text) - LENGTH - 1, samples).astype(np.int64)
    return text[starts[:, None] + np.arange(LENGTH + 1)]


class Layer(nn.Module):
    """Pre-norm transformer layer, [m, T, WIDTH] -> [m, T, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        m, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(m, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(m, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes int64 [m, T] -> logits of the next byte [m, T, BYTES]."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, batch: Mapping[str, Tensor] | Tensor) -> Tensor:
        tokens = batch if isinstance(batch, Tensor) else batch["tokens"][:, :-1].long()
        x = self.token(tokens) + self.position(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
