"""The decoder of model.kind=gpt. m = samples, T = tokens of a sample, V = vocabulary, W = width, H = heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Cache, Model, TensorPlan
from lockstep.models._documents import positions_of, visible_of
from lockstep.models.gpt import Config
from lockstep.models.objectives._choice import ObjectiveModel

BASE = 10_000.0
"""Base of the wavelengths of rotary positions. Source: J. Su et al., RoFormer, 2021."""
INITIAL = 0.02
"""Standard deviation of the first weights, as in GPT-2."""


def turns_at(positions: Tensor, size: int) -> Tensor:
    """Return cosines and sines of angles that grow with positions [T] or [m, 1, T], for heads of D = `size` numbers:
    float32 [2, T, D/2] or [2, m, 1, T, D/2]."""
    steps = torch.arange(size // 2, device=positions.device, dtype=torch.float32) / (size // 2)
    angles = positions.to(torch.float32)[..., None] * BASE**-steps
    return torch.stack([angles.cos(), angles.sin()])


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs of numbers of queries or keys [m, H, T, D]."""
    cos, sin = turns.to(x.dtype)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


Entry = tuple[Tensor, Tensor]
"""Keys and values of a layer, [m, H, T, D]."""
Reads = tuple[Tensor, Tensor | None]
"""The turns of tokens, and what each may attend to, bool [m, 1, t, T]; None for itself and all before it."""


def behind_padding(mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the last `count` of T tokens, int64 [m, 1, count], and the mask of what each attends to,
    bool [m, 1, count, T]; see Model.decode."""
    order = torch.arange(mask.shape[1], device=mask.device)
    is_before = order <= order[-count:, None]
    is_itself = order == order[-count:, None]  # so that padding attends to something
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, None, -count:]
    return positions, (mask[:, None, None, :] & is_before) | is_itself


class Attention(nn.Module):
    """Each token attends to itself and those before it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.width // config.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, reads: Reads) -> Tensor:
        """[m, T, W] -> [m, T, W]; a process that holds some of the heads computes these."""
        return self.decode(x, reads, None)[0]

    def decode(self, x: Tensor, reads: Reads, cache: Entry | None) -> tuple[Tensor, Entry]:
        """Compute `forward` for further tokens [m, t, W], which attend to those in the cache, too."""
        layers = self.query, self.key, self.value
        turns, visible = reads
        query, key, value = (each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in layers)  # [m, H, T, D]
        query, key = rotated(query, turns), rotated(key, turns)
        if cache is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(cache, (key, value), strict=True))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, is_causal=visible is None)
        return self.output(attended.transpose(1, 2).flatten(2)), (key, value)


class FeedForward(nn.Module):
    """Two linear layers with a gate between them. Source: N. Shazeer, GLU Variants Improve Transformer, 2020."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.hidden or -(-config.width * 8 // 3 // 32) * 32
        self.gate, self.up = (nn.Linear(config.width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """Attention and feed-forward layer, each added to what goes in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.norm_1, self.norm_2 = nn.RMSNorm(config.width, eps=1e-6), nn.RMSNorm(config.width, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, reads: Reads) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), reads))
        return x + self.dropout(self.feed_forward(self.norm_2(x)))

    def decode(self, x: Tensor, reads: Reads, cache: Entry | None) -> tuple[Tensor, Entry]:
        """Compute `forward` for further tokens, without dropout."""
        attended, entry = self.attention.decode(self.norm_1(x), reads, cache)
        x = x + attended
        return x + self.feed_forward(self.norm_2(x)), entry


class NextToken(nn.Module):
    """Numbers of a token -> logits of the next one."""

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.linear = nn.Linear(config.width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class GPT(ObjectiveModel):
    """Tokens int64 [m, T] -> logits of the next tokens [m, T, V]."""

    def __init__(self, config: Config, spec: DataSpec, vocabulary: int) -> None:
        super().__init__(spec)
        self.heads, self.tied, self.attention_width = config.heads, config.tied, config.layers * config.width
        self.head_size = config.width // config.heads
        self.embedding = nn.Embedding(vocabulary, config.width)
        layers = [DecoderBlock(config) for _ in range(config.layers)]
        self.layers = nn.ModuleList(layers)
        self.head = NextToken(config, vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL)
        for layer in layers:  # what the blocks add up stays of one size
            for last in (layer.attention.output, layer.feed_forward.down):
                nn.init.normal_(last.weight, std=INITIAL / (2 * config.layers) ** 0.5)
        if config.tied:
            self.head.linear.weight = self.embedding.weight

    def forward(self, batch: Batch) -> Tensor:
        ids, document = batch["input_ids"], batch.get("document")
        if document is None:
            positions, visible = torch.arange(ids.shape[1], device=ids.device), None
        else:
            positions, visible = positions_of(document)[:, None], visible_of(document)
        x, reads = self.embedding(ids), (turns_at(positions, self.head_size), visible)
        for layer in self.layers:
            x = layer(x, reads)
        return self.head(x)

    CACHES = SLIDES = True

    def decode(self, tokens: Tensor, mask: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        positions, visible = behind_padding(mask, tokens.shape[1])
        x, reads, entries = self.embedding(tokens), (turns_at(positions, self.head_size), visible), []
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderBlock)
            x, entry = layer.decode(x, reads, cache[number] if cache else None)
            entries.append(entry)
        return self.head(x[:, -1]), entries

    def blocks(self) -> list[nn.Module]:
        return [self.embedding, *self.layers, self.head]

    def tensor_plan(self) -> TensorPlan:
        """Split heads and hidden numbers; each block then sums over the ranks twice."""
        colwise = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")
        rowwise = ("attention.output", "feed_forward.down")
        return TensorPlan(
            styles={f"layers.*.{name}": "colwise" for name in colwise}
            | {f"layers.*.{name}": "rowwise" for name in rowwise},
            counts={"attention heads": self.heads},
        )


def build(config: Config, spec: DataSpec) -> Model:
    """Build the decoder for the data's tokens. Raises ModelError for data without."""
    if spec.vocabulary is None:
        raise ModelError("model.kind=gpt predicts tokens, but the data has none: set data.kind=text")
    return GPT(config, spec, spec.vocabulary)
