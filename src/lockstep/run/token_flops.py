"""Floating-point operations of a language model per token: with the tokens per second they give its utilization."""

from torch import nn

from lockstep.base.model_contracts import Model


def token_flops(model: Model, context: int) -> int:
    """Operations per token of a sample of `context` tokens, forward and backward, of matrix products and attention:
    6 for each weight but those of embeddings that are only looked up, and 12 T for each number of attention's width.

    What is recomputed does not count, and what a causal mask hides does. Of a mixture of experts, all count.
    Source: A. Chowdhery et al., PaLM, 2022, appendix B: model FLOPs utilization (MFU).
    """
    multiplied = {
        weight: weight.numel()
        for module in model.modules()
        for weight in module.parameters(recurse=False)
        if weight.ndim > 1 and not isinstance(module, nn.Embedding)
    }
    return 6 * sum(multiplied.values()) + 12 * context * model.attention_width
