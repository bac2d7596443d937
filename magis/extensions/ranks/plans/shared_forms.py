"""Checks that refuse, in one line each, the uses of DDP and FSDP that plain twins do not support."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from magis.capture.snapshot import Snapshot
from magis.errors import UsageError
from magis.ops.python_objects import told

OTHERWISE = "use fully_shard over one mesh of all ranks, or DistributedDataParallel"
BY_HAND = "reduce gradients as torch does by itself, or train without magis.optimize"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_others(model: nn.Module, *, refuse: bool) -> bool:
    """Return True if a module is sharded or replicated in any way other than one `DistributedDataParallel` around it.

    With ``refuse``, raises UsageError for every way except `fully_shard`.
    """
    shards = False
    for name, module in model.named_modules():
        shards = shards or isinstance(module, FSDPModule)
        if isinstance(module, (FullyShardedDataParallel, DistributedDataParallel)):
            if not refuse:
                return True
            raise UsageError(f"{type(module).__name__} at {name or 'the root'!r} of the model", hint=OTHERWISE)
    if shards:
        return True
    strange = next((name for name, p in model.named_parameters() if isinstance(p.data, DTensor)), None)
    if strange is not None and refuse:
        raise UsageError(f"{strange} is a distributed tensor of no fully_shard", hint=OTHERWISE)
    return strange is not None


def check_replica(model: DistributedDataParallel) -> None:
    """Raise UsageError for settings of `DistributedDataParallel` that a plain twin does not support."""
    own: Any = model
    odd = {
        "with a communication hook": own._comm_hooks,
        "with hooks of its own": any(getattr(model, hooks) for hooks in _HOOKS),
        "with parameters that it ignores": own.parameters_to_ignore,
        "with mixed precision of its own": own.mixed_precision is not None,
        "under no_sync": not own.require_backward_grad_sync,
    }
    _refuse("DistributedDataParallel", odd)
    if model.broadcast_buffers and next(model.module.buffers(), None) is not None:
        raise UsageError(
            "DistributedDataParallel sends the buffers of its module, which a planned step does not",
            hint="give it broadcast_buffers=False",
        )


def check_group(group: Any) -> None:
    """Raise UsageError for settings of a `fully_shard` parameter group that a plain twin does not support."""
    mesh, params = group.mesh_info, group.fsdp_params
    types = {param._sharded_param_data.dtype for param in params}
    casts = group.mp_policy.param_dtype is not None
    own_messages = [group._all_gather_comm, group._reduce_scatter_comm]
    odd = {
        "over a mesh of several dimensions": mesh.mesh.ndim != 1 or not hasattr(mesh, "shard_process_group"),
        "of weights that are distributed already (tensor parallelism)": any(p.is_dtensor for p in params),
        "along another dimension than the first": any(p.fsdp_placement.dim for p in params),
        "with offloading to the CPU": any(p.offload_to_cpu for p in params),
        "with a factor of its own for gradients": group.gradient_divide_factor is not None,
        "that does not reduce gradients": not (group.reduce_grads and group.all_reduce_grads),
        "with a hook on reduced gradients": group._all_reduce_hook is not None,
        "with sums in place of means": group.force_sum_reduction_for_comms,
        "that reduces gradients of unused parameters": getattr(group, "reduce_scatter_unused_params", False),
        "with messages of its own": any(not type(each).__name__.startswith("Default") for each in own_messages),
        "of tensors that gather themselves": any(
            hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in params
        ),
        "of weights of several data types in one message": len(types) > 1 and not casts,
    }
    _refuse("fully_shard", odd)


def _refuse(what: str, odd: dict[str, Any]) -> None:
    for how, found in odd.items():
        if found:
            raise UsageError(f"{what} {how}", hint=BY_HAND)


def changed_part(snapshot: Snapshot) -> str:
    """Return the first part of a model that changed since the snapshot, in words; "" if none did."""
    paths = (path for path, _, _ in snapshot.changes())
    modes = ("/.training", "/._is_full_backward_hook")
    return next((told(path) for path in paths if not path.endswith(modes)), "")
