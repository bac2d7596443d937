"""Plain copies ("twins") of modules under `fully_shard` or `DistributedDataParallel`, which can be captured.

Torch's wrappers communicate in hooks, which a capture cannot see. A twin is a copy of the module whose parameters share
this rank's memory, and whose collectives are operators (`sharded_weights.py`). The user's parameters get its gradients.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from magis.capture import Workload
from magis.capture.names_in_code import Reads
from magis.capture.snapshot import Snapshot
from magis.errors import UsageError
from magis.extensions.ranks.plans.sharded_weights import GatheredUnit, ShardedParameter, average_weights, hook_unit
from magis.extensions.ranks.plans.shared_forms import OTHERWISE, changed_part, check_group, check_others, check_replica
from magis.ops.collectives import REPLICAS, register_group
from magis.strategies.rank_step import World
from magis.strategies.single_device import blocks_of

FSDP = "torch.distributed.fsdp"
_COPIED = (nn.Module, types.MethodType, partial, dict, list, tuple, set)
"""Types that may hold modules, so that the twin needs copies of such objects."""
_HELD = Reads(own=None, names=frozenset())
"""Reads of all that modules hold, without what other objects hold."""
STATES = (STATE_KEY, REGISTRY_KEY)
"""Attributes in which torch's composable APIs record their state on a module."""


@dataclass(frozen=True, eq=False)
class Held:
    """Parameter of the user's module, and the plain parameter that shares its memory."""

    own: nn.Parameter
    plain: nn.Parameter
    sharded: Any = None
    """Torch's FSDPParam of a sharded parameter; None for a whole one."""

    @property
    def is_current(self) -> bool:
        """True if both parameters still share the same memory."""
        memory: Tensor = self.own if self.sharded is None else self.sharded._sharded_param_data
        return memory.data_ptr() == self.plain.data_ptr()

    def hand_over(self) -> None:
        """Move the gradient of the plain parameter to the user's parameter, adding to an earlier gradient."""
        grad, self.plain.grad = self.plain.grad, None
        if grad is None:
            return
        if self.sharded is not None:  # without the padding
            size, stride = self.sharded.sharded_size, self.sharded.contiguous_sharded_stride
            grad = cast("Tensor", self.sharded.to_sharded_dtensor(torch.as_strided(grad, size, stride)))
        if self.own.grad is None:
            self.own.grad = grad
        else:
            self.own.grad.add_(grad)


@dataclass(frozen=True, eq=False)
class SharedModule:
    """Plain twin of a module that torch shards or replicates over ranks."""

    module: nn.Module
    world: World
    held: tuple[Held, ...]
    modes: tuple[tuple[nn.Module, nn.Module], ...]
    """Pairs of user's module and twin, whose `training` flags are kept equal."""
    user: nn.Module
    snapshot: Snapshot
    """State of the user's module when the twin was made."""

    def refresh(self) -> None:
        """Copy the `training` flags of the user's module. Raises UsageError if anything else in the module changed."""
        check_forms(self.user)
        for theirs, plain in self.modes:
            plain.training = theirs.training
        if not all(each.is_current for each in self.held):
            raise UsageError("the weights of the model have moved in memory", hint="call magis.optimize again")
        changed = changed_part(self.snapshot)
        if changed:
            raise UsageError(f"{changed} has changed", hint="call magis.optimize again")

    def hand_over(self) -> None:
        """Move all gradients to the user's parameters."""
        for each in self.held:
            each.hand_over()


def is_shared(model: nn.Module) -> bool:
    """Return True if a module is sharded or replicated over ranks, even in a way that has no twin."""
    return isinstance(model, DistributedDataParallel) or check_others(model, refuse=False)


def shared_module(model: nn.Module) -> SharedModule:
    """Return the plain twin of a sharded or replicated module. Raises UsageError if the wrapper has no twin."""
    return _replicated(model) if isinstance(model, DistributedDataParallel) else _sharded(model)


def check_forms(model: nn.Module) -> None:
    """Raise UsageError for settings that a twin does not support; reshards gathered weights."""
    if isinstance(model, DistributedDataParallel):
        check_replica(model)
    else:
        for _, group in _groups(model):
            check_group(group)


def _replicated(model: DistributedDataParallel) -> SharedModule:
    check_replica(model)
    if check_others(model.module, refuse=True):
        raise UsageError("DistributedDataParallel around a model under fully_shard", hint=OTHERWISE)
    group = model.process_group
    world = _world(group, "DistributedDataParallel")
    held = tuple(Held(p, nn.Parameter(p.detach(), p.requires_grad)) for p in model.module.parameters())
    twin = _twin(model.module, {id(each.own): each.plain for each in held})
    blocks = blocks_of(cast("Workload", _Named(twin)))
    average_weights(twin, blocks, world.size, register_group(group, REPLICAS))
    modes = tuple(zip(model.module.modules(), twin.modules(), strict=True))
    return SharedModule(twin, world, held, modes, model, Snapshot({"model": model.module}, _HELD))


@dataclass(frozen=True)
class _Named:
    """Minimal workload, with the attributes that `blocks_of` reads."""

    module: nn.Module
    blocks: tuple[str, ...] = ()


def _sharded(model: nn.Module) -> SharedModule:
    check_others(model, refuse=True)
    found = list(_groups(model))
    if not found:
        raise UsageError("fully_shard of modules without parameters", hint=OTHERWISE)
    for _, each in found:
        check_group(each)
    group = found[0][1].mesh_info.shard_process_group
    world = _world(group, "fully_shard")
    held = []
    for _, each in found:
        if each.mesh_info.shard_process_group.size() != world.size:
            raise UsageError("fully_shard over several groups of ranks", hint=OTHERWISE)
        each.lazy_init()
        for param in each.fsdp_params:
            memory = param._sharded_param_data.view(param.padded_sharded_param_size)
            own: nn.Parameter = param.sharded_param
            held.append(Held(own, nn.Parameter(memory, own.requires_grad), param))
    twin = _twin(model, {id(each.own): each.plain for each in held})
    pairs = dict(zip(model.modules(), twin.modules(), strict=True))
    name = register_group(group, REPLICAS)
    for modules, each in found:
        part = pairs[modules[0]] if len(modules) == 1 else twin
        paths = {module: path for path, module in part.named_modules()}
        pieces = tuple(_piece(param, pairs, paths) for param in each.fsdp_params)
        policy = each.mp_policy
        unit = GatheredUnit(pieces, world.size, name, policy.param_dtype, policy.reduce_dtype)
        part.register_forward_hook(partial(_shown_in_backward, unit))
        hook_unit(part, unit, first=True)
    for module, plain in pairs.items():
        if isinstance(module, FSDPModule):  # with parameters of its own or without
            state: Any = module._get_fsdp_state()
            _hook_casts(plain, state._mp_policy)
    return SharedModule(twin, world, tuple(held), tuple(pairs.items()), model, Snapshot({"model": model}, _HELD))


def _groups(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, ...], Any]]:
    """Reshard all modules, and yield torch's FSDP parameter groups, each with its modules."""
    seen = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.reshard()
        state: Any = module._get_fsdp_state()
        if state in seen:
            continue
        seen.add(state)
        for group in parameter_groups(state):
            yield state._modules, group


def parameter_groups(state: Any) -> Sequence[Any]:
    """Return torch's FSDP parameter groups of a module's state. Torch before 2.12 has one or none."""
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None)
    return ([] if one is None else [one]) if groups is None else groups


def _world(group: dist.ProcessGroup, what: str) -> World:
    size, rank = dist.get_world_size(), dist.get_rank()
    if group.size() != size:
        raise UsageError(f"{what} over {group.size()} of {size} ranks", hint=OTHERWISE)
    return World(size, rank)


def _piece(param: Any, pairs: Mapping[nn.Module, nn.Module], paths: Mapping[nn.Module, str]) -> ShardedParameter:
    info = param._module_info
    owners = zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True)
    named = tuple((paths[pairs[module]], name) for module, name in owners)
    own = param.sharded_param
    return ShardedParameter(named, tuple(param._orig_size), own.requires_grad, dtype=own.dtype)


def _shown_in_backward(unit: GatheredUnit, module: nn.Module, _args: Any, output: Any) -> None:
    """Make the unit's gathered parameters visible to the modules in the backward, too, where checkpointed blocks run.

    They stay visible until their gradients arrive or the backward ends.
    """
    places = [(module.get_submodule(path), name) for piece in unit.pieces for path, name in piece.owners]
    shown = {place: vars(place[0])[place[1]] for place in dict.fromkeys(places)}
    awaited = {id(tensor) for tensor in shown.values() if tensor.requires_grad}

    def hidden() -> None:
        for holder, name in shown:
            vars(holder).pop(name, None)
        shown.clear()

    def again(_grad: Tensor) -> None:
        for (holder, name), tensor in shown.items():
            vars(holder)[name] = tensor
        if shown:
            engine: Any = Variable._execution_engine
            engine.queue_callback(hidden)

    def over(number: int, _grad: Tensor) -> None:
        awaited.discard(number)
        if not awaited:
            hidden()

    for tensor in {id(tensor): tensor for tensor in shown.values() if tensor.requires_grad}.values():
        tensor.register_hook(partial(over, id(tensor)))
    for tensor in torch.utils._pytree.tree_iter(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(again)


def _hook_casts(module: nn.Module, policy: Any) -> None:
    """Make a module cast its inputs and outputs as its mixed-precision policy says."""
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        module.register_forward_pre_hook(partial(_cast_inputs, policy.param_dtype), prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(partial(_cast_output, policy.output_dtype))


def _cast_inputs(dtype: torch.dtype, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _as(args, dtype), _as(kwargs, dtype)


def _cast_output(dtype: torch.dtype, _module: nn.Module, _args: Any, output: Any) -> Any:
    return _as(output, dtype)


def _as(given: Any, dtype: torch.dtype) -> Any:
    def one(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item

    return torch.utils._pytree.tree_map(one, given)


def _twin(model: nn.Module, parameters: Mapping[int, nn.Parameter]) -> nn.Module:
    """Return a copy of a module without the state of torch's sharding.

    ``parameters`` maps `id` of the model's parameters to the copy's; all other tensors of the modules are shared.
    """
    memo: dict[int, Any] = dict(parameters)
    theirs = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in model.modules():
        for item in torch.utils._pytree.tree_iter([*vars(module).values()]):
            if isinstance(item, Tensor) or not isinstance(item, _COPIED):  # objects are those of the user's module
                memo.setdefault(id(item), item)
    for module in theirs:
        _, original, *_ = type(module).__bases__
        memo[id(module)] = object.__new__(original)
    try:
        for module in theirs:
            own = {name: _without_sharding(name, value) for name, value in vars(module).items() if name not in STATES}
            memo[id(module)].__dict__.update(copy.deepcopy(own, memo))
        return copy.deepcopy(model, memo)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"the model cannot be copied, and what is planned is a copy: {type(error).__name__}: {reason}",
            hint="keep what cannot be copied (locks, groups of processes) outside of its attributes",
        ) from error


def _without_sharding(name: str, value: Any) -> Any:
    """Return an attribute of a module; from a dict of hooks, those of `fully_shard` are removed."""
    if not name.endswith("_hooks") or not isinstance(value, dict):
        return value
    others = ((key, hook) for key, hook in value.items() if not str(getattr(hook, "__module__", "")).startswith(FSDP))
    return type(value)(others)
