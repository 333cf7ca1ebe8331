"""FSDP units: checks of their order, and hooks that keep the gradient sums of a plain backward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils import _pytree as pytree

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Model
from lockstep.core.host.activity import waiting_in
from lockstep.core.host.phases import phase
from lockstep.core.modules.dtensors import is_dtensor, refuse_sparse
from lockstep.core.modules.weight_watch import WeightWatch


class OrderedUnits:
    """Checks that every micro-batch runs all units in one order: else ranks would wait for different collectives."""

    def __init__(self, model: Model, units: Sequence[nn.Module]) -> None:
        named = {module: name for name, module in model.named_modules()}
        self.model, self.units, self.names = model, list(units), [named[unit] for unit in units]
        self.number = 0
        """Number of the unit that has to run next."""
        self.is_active = False
        """Whether the model runs in training; some unit may run without gradients in it, such as a frozen copy."""

    def register_hooks(self) -> None:
        """Register the checks, before FSDP's own hooks; call it after FSDP has wrapped the units."""
        for number, unit in enumerate(self.units):
            unit.register_forward_pre_hook(partial(self._enter, number), prepend=True)
        self.model.register_forward_pre_hook(self._begin)
        self.model.register_forward_hook(self._end)

    def start(self) -> None:
        self.number = 0

    def _begin(self, *_: Any) -> None:
        self.is_active = self.model.training and torch.is_grad_enabled()

    def _enter(self, number: int, unit: nn.Module, _: Any) -> None:
        is_ungraded = not torch.is_grad_enabled() and any(each.requires_grad for each in unit.parameters())
        if not self.is_active or is_ungraded:  # such as by a reentrant checkpoint
            return
        if number != self.number:
            self._refuse(min(number, self.number))
        self.number += 1

    def _end(self, *_: Any) -> None:
        if self.is_active and self.number < len(self.units):
            self._refuse(self.number)
        self.is_active = False

    def _refuse(self, number: int) -> None:
        raise ModelError(
            f"{self.names[number]} does not run once in every micro-batch, at the same place, and parallel.kind=fsdp "
            "gathers the weights of a block on all processes when it runs: leave it out of blocks(), so that it is "
            "gathered with the rest of the model, or use parallel.kind=ddp with parallel.find_unused=true. If "
            "torch.utils.checkpoint runs it: with use_reentrant=False, or have train.recompute=true do that"
        )


class AllGather(DefaultAllGather):
    """FSDP's all-gather, marked as a wait for other ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with waiting_in("the all-gather of weights"):
            return super().__call__(*args, **kwargs)


def clone_views(unit: nn.Module, _: Any, outputs: Any) -> Any:
    """Clone a unit's outputs that are views, since FSDP's hook on a view is lost when the view is changed in place, and
    those in the memory of weights, which FSDP frees."""
    gathered = {each.untyped_storage().data_ptr() for each in unit.parameters() if not is_dtensor(each)}

    def is_cloned(leaf: Tensor) -> bool:
        is_view = torch.is_grad_enabled() and leaf._base is not None
        return is_view or leaf.untyped_storage().data_ptr() in gathered

    return pytree.tree_map_only(Tensor, lambda leaf: leaf.clone() if is_cloned(leaf) else leaf, outputs)


def use_multi_grad_hook(module: Any) -> None:
    """Replace FSDP's post-backward autograd function by a hook on views of the unit's inputs: the function forbids
    changes in place, and sums the gradients of several inputs in another order."""
    for group in _parameter_groups(module):
        group._register_post_backward_hook = partial(_register_hook, group)
        group.post_backward = partial(_checked_post_backward, group, group.post_backward)


def reduce_unused(module: Any) -> None:
    """Reduce zeros for parameters without a gradient: other ranks may have one for them."""
    if hasattr(module, "set_reduce_scatter_unused_params"):  # since torch 2.13
        module.set_reduce_scatter_unused_params(True)
        return
    for group in _parameter_groups(module):
        group.post_backward = partial(_post_backward_with_zeros, group, group.post_backward)


def _post_backward_with_zeros(group: Any, post_backward: Callable[[], None]) -> None:
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None and whole.requires_grad and whole.grad is None:
            whole.grad = torch.zeros_like(whole)
    post_backward()


def reduce_each_dtype(module: Any) -> None:
    """Reduce the gradients of each dtype on their own: FSDP gathers parameters of several dtypes together, but reduces
    only gradients of one. Sets `part` of its TreeReduceScatter. Call it last."""
    for group in _parameter_groups(module):
        if len({each.sharded_param.dtype for each in group.fsdp_params}) > 1:
            group._init_mp_dtypes = partial(_for_each_dtype, group, lambda: None)
            group.post_backward = partial(_post_backward_of_each_dtype, group, group.post_backward)


def _post_backward_of_each_dtype(group: Any, post_backward: Callable[[], None]) -> None:
    reshards, group.reshard_after_backward = group.reshard_after_backward, False
    try:
        _for_each_dtype(group, post_backward)
    finally:
        group.reshard_after_backward = reshards
    if reshards:
        group.reshard()


def _for_each_dtype(group: Any, method: Callable[[], None]) -> None:
    """Call a method of a group as if it had the parameters of one dtype only, for each dtype."""
    parameters = group.fsdp_params
    try:
        for dtype in dict.fromkeys(each.sharded_param.dtype for each in parameters):
            group.fsdp_params = [each for each in parameters if each.sharded_param.dtype == dtype]
            group._reduce_scatter_comm.part = dtype
            type(group)._init_mp_dtypes(group)
            method()
    finally:
        group.fsdp_params = parameters


def _checked_post_backward(group: Any, post_backward: Callable[[], None]) -> None:
    for parameter in group.fsdp_params:
        if hasattr(parameter, "_unsharded_param"):
            refuse_sparse(parameter._unsharded_param)
    post_backward()


def mark_waits(module: Any) -> None:
    """Count as exchange where a GPU's computation waits for FSDP's streams, on which collectives run."""
    for group in _parameter_groups(module):
        for name in ("wait_for_unshard", "post_backward", "finalize_backward"):
            setattr(group, name, partial(_exchanging, getattr(group, name)))


def _exchanging(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with phase("exchange"):
        return method(*args, **kwargs)


def set_process_group(model: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Gather and reduce over another process group of the same size, in which this rank has the same place."""
    for group in _all_groups(model):
        group.mesh_info.shard_process_group = process_group


def forget_pass(model: Any) -> None:
    """Reset the model after a failed pass, if it has had any; drop the gradients so far, which FSDP would add to."""
    if not model._get_fsdp_state()._is_root:
        return
    if hasattr(model, "reset_iter_state"):  # since torch 2.13
        model.reset_iter_state()
    else:
        _reset_pass(model)
    for parameter in (each for group in _all_groups(model) for each in group.fsdp_params):
        parameter.sharded_param.grad = parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # gathered at least once
            parameter._unsharded_param.grad = None


class GatheredWeights:
    """Tensors that the model's code may find under the names of parameters: shards, and gathered parameters."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self.model, self.parameters = model, parameters
        self.names = {parameter: name for name, parameter in parameters.items()}

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.parameters.items()
        for group in _all_groups(self.model):
            yield from self._of(group)

    def _of(self, group: Any) -> Iterator[tuple[str, Tensor]]:
        for part in group.fsdp_params:
            if hasattr(part, "_unsharded_param"):
                yield f"{self.names[part.sharded_param]} (gathered)", part._unsharded_param

    def watch(self, watch: Callable[[], WeightWatch]) -> None:
        """Compare weights between their gathering and their release. Call it once."""
        for group in _all_groups(self.model):
            group.wait_for_unshard = partial(self._gather, group, group.wait_for_unshard, watch)
            group.reshard = partial(self._free, group, group.reshard, watch)

    def _gather(self, group: Any, wait_for_unshard: Callable[[], None], watch: Callable[[], WeightWatch]) -> None:
        wait_for_unshard()
        watch().read(self._of(group))

    def _free(self, group: Any, reshard: Callable[[], None], watch: Callable[[], WeightWatch]) -> None:
        watch().compare(self._of(group))
        reshard()


def _reset_pass(model: Any) -> None:
    """Do what FSDPModule.reset_iter_state does, for torch 2.11 and 2.12."""
    root = model._get_fsdp_state()
    root._device_handle.synchronize()  # nothing is in flight any more that would have to be waited for
    shared = root._comm_ctx
    shared.all_gather_state, shared.reduce_scatter_state, shared.reduce_scatter_states = None, None, []
    shared.post_forward_order.clear()
    root._state_ctx.iter_forward_root, root._state_ctx.post_backward_final_callback_queued = None, False
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        state = module._get_fsdp_state()
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in _parameter_groups(module):
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()


def _all_groups(model: nn.Module) -> list[Any]:
    return [group for each in model.modules() if isinstance(each, FSDPModule) for group in _parameter_groups(each)]


def _parameter_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _register_hook(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not torch.is_grad_enabled():
        return args, kwargs
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
    hooked = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not hooked:
        return args, kwargs
    register_multi_grad_hook(hooked, lambda _: group.post_backward())
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs
