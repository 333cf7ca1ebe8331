"""The next token at every position: cross-entropy, perplexity, bits per byte.

m = samples in a micro-batch, T = tokens of a sample, V = vocabulary. A batch holds "input_ids" and "target", int64
[m, T]: the tokens, and those that follow them; a target of IGNORED does not count. "bytes", int64 [m], tells how many
bytes of text the targets of a sample stand for.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import SAMPLES, Batch, LossSum, Outputs
from lockstep.core.modules.outputs import logits_of, widened
from lockstep.core.numerics.word_tokens import IGNORED
from lockstep.models.objectives._objective import Objective

TARGET, BYTES = "target", "bytes"
BYTES_PER_TOKEN = "_bytes"
MOST_NATS = 700.0
"""Largest exponent of exp(), which is infinite above."""


class CausalLM(Objective):
    """A language model that reads from left to right."""

    TARGETS = (TARGET, BYTES)
    NEEDS = "tokens to predict, as data.kind=text gives them"
    PURPOSE = "that continues texts"
    GENERATES = True
    SMOOTHS = True

    def is_taught_by(self, spec: DataSpec) -> bool:
        return spec.vocabulary is not None

    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Sum the cross-entropy of logits [m, T, V] against the next tokens, over those that count."""
        logits, target = logits_of(widened(outputs)), batch.get(TARGET)
        if logits is None or target is None or logits.shape[:-1] != target.shape:
            given = "nothing" if logits is None else str(list(logits.shape))
            wanted = "no column 'target'" if target is None else f"targets {list(target.shape)}"
            raise ModelError(
                f"model.objective=causal_lm takes logits [samples, tokens, vocabulary]; the model gives {given}, and "
                f"the data {wanted}"
            )
        total, count = self.cross_entropy(logits.flatten(0, 1), target.flatten())
        sums = {SAMPLES: total.new_full((), float(len(target)))}
        if BYTES in batch:
            sums[BYTES_PER_TOKEN] = batch[BYTES].sum()
        return LossSum(total, count, sums)

    def rows(self, outputs: Outputs, batch: Batch, spec: DataSpec) -> tuple[Tensor, Tensor] | None:
        """Return float64 [m, 4]: the mean loss of a sample's tokens and, of the token that surprises most, its id, the
        likeliest id in its place, and the probability of that; and where in the sample it is, int64 [m]."""
        logits, target = logits_of(widened(outputs)), batch.get(TARGET)
        if logits is None or target is None or logits.shape[:-1] != target.shape:
            return None
        losses = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=IGNORED, reduction="none")
        means = losses.sum(1) / (target != IGNORED).sum(1).clamp_min(1)
        samples, place = torch.arange(len(losses), device=losses.device), losses.argmax(1)
        probability, likeliest = logits[samples, place].softmax(-1).max(-1)
        columns = [means, target[samples, place].clamp_min(0), likeliest, probability]
        return torch.stack([each.detach().double() for each in columns], dim=1).cpu(), place.cpu()

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Compute perplexity and, as it does not depend on the tokenizer, bits per byte."""
        nats = means["loss"]
        found = {"perplexity": math.exp(min(nats, MOST_NATS))}
        if per_token := means.get(BYTES_PER_TOKEN):
            found["bits_per_byte"] = nats / math.log(2) / per_token
        return found


build = CausalLM
