"""Decoding of several completions at once, which begin and end at different times.

m = completions, T = tokens that have been read, V = vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lockstep.base.model_contracts import Cache, Forward, Model
from lockstep.core.modules.outputs import logits_of
from lockstep.models._documents import are_close

ROUNDED = 32
"""Rows are padded to multiples of it, since a processor's kernels are compiled, and kept, for each length."""
KEPT = 3 / 4
"""Share of a full context that is read again; the rest is room for further tokens."""


class RecomputedDecoding:
    """Token rows, and the logits of the token that follows each; for any causal model, all tokens are read again. Later
    tokens do not change earlier outputs, so rows are padded at the end."""

    def __init__(self, forward: Forward, context: int, device: torch.device) -> None:
        self.forward, self.context, self.device = forward, context, device
        self.rows: list[list[int]] = []
        self.logits = torch.zeros(0, 0, device=device)
        """float [m, V]."""

    def join(self, prompts: Sequence[list[int]]) -> None:
        """Add rows at the end. No prompt is empty."""
        self.rows += [[*prompt] for prompt in prompts]
        self._compute()

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.rows, self.logits = [self.rows[row] for row in rows], self.logits[rows]

    def read(self, tokens: list[int]) -> None:
        """Add a token to each row."""
        self.rows = [[*row, token][-self.context :] for row, token in zip(self.rows, tokens, strict=True)]
        self._compute()

    def _compute(self) -> None:
        longest = max(map(len, self.rows))
        length = max(longest, min(-(-longest // ROUNDED) * ROUNDED, self.context))
        tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in self.rows], device=self.device)
        logits = logits_of(self.forward({"input_ids": tokens}))
        assert logits is not None
        self.logits = torch.stack([logits[number, len(row) - 1] for number, row in enumerate(self.rows)])


class CachedDecoding(RecomputedDecoding):
    """Decoding with a cache of keys and values; shorter rows have padding before their first token."""

    def __init__(self, model: Model, context: int, device: torch.device) -> None:
        super().__init__(model, context, device)
        self.model = model
        self.cache: Cache = []
        self.mask = torch.zeros(0, 0, dtype=torch.bool, device=device)

    def join(self, prompts: Sequence[list[int]]) -> None:
        self.rows += [[*prompt] for prompt in prompts]
        rows = [torch.tensor(prompt, device=self.device) for prompt in prompts]
        tokens = pad_sequence(rows, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(row).bool() for row in rows], batch_first=True, padding_side="left")
        logits, cache = self.model.decode(tokens, mask, None)
        if not len(self.mask):
            self.mask, self.logits, self.cache = mask, logits, cache
            return
        longest = max(self.mask.shape[1], mask.shape[1])
        self.cache = [
            (_concatenate(keys, new_keys, longest), _concatenate(values, new_values, longest))
            for (keys, values), (new_keys, new_values) in zip(self.cache, cache, strict=True)
        ]
        self.mask = torch.cat([_pad(each, longest, dim=1) for each in (self.mask, mask)])
        self.logits = torch.cat([self.logits, logits])

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.mask = self.mask[rows]
        padding = int((~self.mask).all(0).sum()) if rows else 0  # before the longest of the rows that are left
        self.mask = self.mask[:, padding:]
        self.cache = [(keys[rows, :, padding:], values[rows, :, padding:]) for keys, values in self.cache]

    def read(self, tokens: list[int]) -> None:
        full = [row for row, read in enumerate(self.rows) if self.model.SLIDES and len(read) >= self.context]
        if not full:
            self._append(tokens)
            return
        # cached values depend on tokens that would be dropped, which degrades the outputs: read the rest again
        again = [[*self.rows[row], tokens[row]][-int(self.context * KEPT) :] for row in full]
        going_on = [row for row in range(len(self.rows)) if row not in full]
        self.keep(going_on)
        if going_on:
            self._append([tokens[row] for row in going_on])
        self.join(again)
        order = [*going_on, *full]
        self.keep([order.index(row) for row in range(len(order))])

    def _append(self, tokens: list[int]) -> None:
        self.rows = [[*row, token] for row, token in zip(self.rows, tokens, strict=True)]
        self.mask = F.pad(self.mask, (0, 1), value=True)
        column = torch.tensor(tokens, device=self.device)[:, None]
        self.logits, self.cache = self.model.decode(column, self.mask, self.cache)


def decoding_of(forward: Forward, context: int, device: torch.device, *, caches: bool = True) -> RecomputedDecoding:
    """Return the fastest decoding that a model supports; without `caches`, the one that every model supports."""
    if caches and isinstance(forward, Model) and forward.CACHES:
        return CachedDecoding(forward, context, device)
    return RecomputedDecoding(forward, context, device)


def caches_well(forward: Forward, context: int, device: torch.device) -> bool:
    """Return whether a cache gives the same logits as none, for prompts of different lengths together: not where
    positions count from the padding, as those of BART, or where there is no cache, as with OpenAI's first GPT."""
    found = []
    with torch.inference_mode():
        for caches in (False, True):
            decoding = decoding_of(forward, context, device, caches=caches)
            try:
                decoding.join([[1, 2, 3, 4, 5][: context - 1], [1]])
                decoding.read([2, 3])
            except Exception:
                if not caches:
                    raise
                return False
            found.append(decoding.logits)
    return are_close(found[1], found[0])


def _pad(tensor: Tensor, length: int, *, dim: int) -> Tensor:
    """Pad the beginning of a dimension, so that rows end together."""
    missing = length - tensor.shape[dim]
    return F.pad(tensor, (*[0, 0] * (tensor.ndim - 1 - dim), missing, 0)) if missing else tensor


def _concatenate(one: Tensor, other: Tensor, length: int) -> Tensor:
    return torch.cat([_pad(each, length, dim=2) for each in (one, other)])
