"""What autograd keeps of each block for the backward pass, counted tensor by tensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from lockstep.base.model_contracts import Batch, Model
from lockstep.core.modules.blocks import with_weights
from lockstep.core.modules.outputs import widened
from lockstep.core.numerics.loss import unweighted


def kept_by_block(model: Model, batch: Batch, autocast: Callable[[], Any]) -> list[tuple[int, int]]:
    """Run a forward pass -> for each block with weights the bytes kept since the end of the block before, and the bytes
    of its outputs.

    Storage that several operations keep counts once; weights do not count. With train.recompute, what blocks would keep
    without it is counted: a block in evaluation mode is not recomputed (its submodules stay in training mode, for
    their dropout).
    """
    blocks = with_weights(model.blocks())
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    known |= {column.untyped_storage().data_ptr() for column in batch.values()}
    kept, passed_on = [0] * len(blocks), [0] * len(blocks)
    done = 0

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept[min(done, len(blocks) - 1)] += storage.nbytes()
        return tensor

    def left(_: Any, __: Any, outputs: Any) -> None:
        nonlocal done
        passed_on[min(done, len(blocks) - 1)] = sum(
            leaf.nbytes for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)
        )
        done += 1

    handles = [block.register_forward_hook(left) for block in blocks]
    try:
        for block in blocks:
            block.training = False  # not its submodules: see above
        with saved_tensors_hooks(pack, lambda tensor: tensor), autocast():
            outputs = model(batch)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            total = unweighted(model.loss(widened(outputs), batch)).total
        assert torch.is_tensor(total)  # the graph has to live until here
    finally:
        for handle in handles:
            handle.remove()
        model.train()
    return list(zip(kept, passed_on, strict=True))
