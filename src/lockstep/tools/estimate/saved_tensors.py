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
    """Run a forward pass -> for each block with weights the bytes kept from the end of the one before, and the bytes
    handed on.

    Memory that several operations keep counts once, and weights do not count. With train.recompute, too, what the
    blocks would keep without it is counted: a block that is not in training itself keeps everything (its parts still
    are, so that their dropout runs).
    """
    blocks = with_weights(model.blocks())
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    known |= {column.untyped_storage().data_ptr() for column in batch.values()}
    kept, handed = [0] * len(blocks), [0] * len(blocks)
    done = 0

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept[min(done, len(blocks) - 1)] += storage.nbytes()
        return tensor

    def left(_: Any, __: Any, outputs: Any) -> None:
        nonlocal done
        handed[min(done, len(blocks) - 1)] = sum(
            leaf.nbytes for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)
        )
        done += 1

    handles = [block.register_forward_hook(left) for block in blocks]
    try:
        for block in blocks:
            block.training = False  # without its parts: see above
        with saved_tensors_hooks(pack, lambda tensor: tensor), autocast():
            outputs = model(batch)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            total = unweighted(model.loss(widened(outputs), batch)).total
        assert torch.is_tensor(total)  # alive until here, with all that it keeps
    finally:
        for handle in handles:
            handle.remove()
        model.train()
    return list(zip(kept, handed, strict=True))
