"""Tensor parallel: every process holds a part of each large layer, and a micro-batch runs through all parts at once.

M. Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism, 2019; here by
PyTorch's `parallelize_module`, with the plan that transformers ships for a model.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lockstep.parallel.strategy_config import StrategySection


class Config(StrategySection):
    """Every process holds a part of each large layer (some heads, some columns), its gradient and its optimizer state,
    for an exchange of activations after every attention and MLP, in both passes. Needs a model with a plan, such as
    Llama, Qwen2 or Mistral."""

    SPLITS_TENSORS: ClassVar[bool] = True
    SHARES_SHARDS: ClassVar[bool] = True
    HAS_COMMON_BITS: ClassVar[bool] = False

    size: Annotated[int, Field(ge=1, le=2**16)] | Literal["all"] = "all"
    """Processes that share a model; the others form replicas of it. A layer's sums are split between them, so the last
    bits of the weights depend on it."""

    @property
    def process_multiple(self) -> int:
        """With `all`, another number would be another size."""
        return 0 if self.size == "all" else self.size

    def numeric(self, processes: int) -> dict[str, Any]:
        return {"kind": "tensor", "size": processes if self.size == "all" else self.size}

    @property
    def breaks_reproducibility(self) -> str:
        if self.size == "all":
            return "parallel.kind is tensor: the last bits of the weights depend on the number of processes"
        return f"parallel.kind is tensor: the last bits of the weights depend on parallel.size={self.size}"
