"""Collectives as operators of a step: torch's functional collectives.

    _c10d_functional.all_gather_into_tensor(%x [k], ranks, group)      -> [ranks * k], the %x of all ranks in order
    _c10d_functional.reduce_scatter_tensor(%x [k], op, ranks, group)   -> [k / ranks], this rank's shard of the result
    _c10d_functional.all_reduce(%x, op, group)                         -> the result, shaped like %x

A captured step waits for each collective at its call, without an operator for the wait. A plan waits later:

    magis.arrived(%result, %x)      from here on %x may be freed or written, and %result read

A process group has the same name on all ranks (`register_group`), so that all ranks have the same graph.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type

from magis.graph import ARRIVED, Op
from magis.ops.exchanges import EXCHANGE

COLLECTIVES = "_c10d_functional."
"""Prefix of the names of functional collectives."""
NAMED = "magis-"
"""Prefix of the names that `group_name` returns."""
REPLICAS = "dp"
"""Role of process groups whose ranks run the same step (data parallel)."""
MESSAGES = "messages"
"""Storage that collectives with a fixed order write in the graph, so that its versions keep the order."""
WAITS = (f"{COLLECTIVES}wait_tensor.default", f"{COLLECTIVES}_wrap_tensor_autograd.default")
WAIT = torch.ops._c10d_functional.wait_tensor.default
_SIZE = re.compile(r".*-x(\d+)")


def group_name(role: str, ranks: int) -> str:
    """Return the name of a process group of ``ranks`` ranks with a role such as "dp"."""
    return f"{NAMED}{role}-x{ranks}"


def register_group(group: dist.ProcessGroup, role: str) -> str:
    """Register the process group under its `group_name`, until torch.distributed is shut down; return the name."""
    name = group_name(role, group.size())
    known: Any = torch._C._distributed_c10d
    known._unregister_process_group(name)
    known._register_process_group(name, group)
    return name


def name_group(mesh: DeviceMesh, role: str) -> None:
    """Register the process group of a 1-d mesh, and make DTensors on the mesh use its `group_name`.

    torch's own names of such groups differ between ranks.
    """
    group: Any = mesh.get_group()
    name = register_group(group, role)
    group._set_group_name(name)
    own: Any = mesh
    own._dim_group_names = [name]
    own._get_root_mesh()._pg_registry[name] = group


def keeps_order(target: str, args: Sequence[Any]) -> bool:
    """Return True if all ranks must issue this collective in one order relative to other collectives.

    Replicas run equal steps and so issue collectives in one order; ranks of other groups may run different steps.
    """
    sends = is_message(target) and target not in WAITS
    return sends and not str(args[-1]).startswith(f"{NAMED}{REPLICAS}-")


def is_collective(target: str) -> bool:
    """Return True if the operator of that name is a functional collective."""
    return target.startswith(COLLECTIVES)


def is_message(target: str) -> bool:
    """Return True if the operator of that name communicates with other ranks."""
    return target == EXCHANGE or is_collective(target)


def ranks_of(op: Op) -> int:
    """Return the size of a collective's process group."""
    *_, group = op.args
    found = _SIZE.fullmatch(str(group))
    if found is not None:
        return int(found[1])
    count = op.args[-2]
    return count if isinstance(count, int) else 2


def name_of_collective(op: Op) -> str:
    """Return a collective's name without namespace and overload, such as "all_reduce"."""
    return op.target.split(".")[1]


def wrapped(types: Iterable[type]) -> bool:
    """Return True if any type is a wrapper subclass (DTensor, jagged tensor) that calls operators on inner tensors."""
    return any(map(is_traceable_wrapper_subclass_type, types))


@contextmanager
def propagated_apart() -> Iterator[None]:
    """Make DTensor's metadata propagation run outside of all dispatch modes within the block."""
    propagation = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if propagation is None:
        yield
        return
    propagator, name = propagation.ShardingPropagator, "_propagate_tensor_meta_non_cached"
    usual = getattr(propagator, name)

    def apart(*args: Any) -> Any:
        with _disable_current_modes():
            return usual(*args)

    setattr(propagator, name, apart)
    try:
        yield
    finally:
        setattr(propagator, name, usual)


def is_wait(func: Any) -> bool:
    """Return True if the operator only returns its argument: `wait_tensor`, or torch's autograd wrapper."""
    return str(func) in WAITS


def waited(result: Tensor) -> Tensor:
    """Wait for a collective's output, and return it."""
    if not isinstance(result, FakeTensor):  # the wait would make a second fake tensor
        WAIT(result)
    return result


def all_gather(shard: Tensor, ranks: int, group: str) -> Tensor:
    """Return the shards [k] of all ranks, concatenated: [ranks * k]."""
    return waited(torch.ops._c10d_functional.all_gather_into_tensor(shard, ranks, group))


def reduce_scatter(whole: Tensor, ranks: int, group: str) -> Tensor:
    """Return this rank's shard [k] of the mean of all ranks' tensors [ranks * k]."""
    return waited(torch.ops._c10d_functional.reduce_scatter_tensor(whole, "avg", ranks, group))


def all_reduce(tensor: Tensor, operation: str, group: str) -> Tensor:
    """Return the all-reduced tensor; operation is "avg" or "sum"."""
    return waited(torch.ops._c10d_functional.all_reduce(tensor, operation, group))


def arrived(result: Tensor, *_sent: Tensor) -> None:
    """Wait for an asynchronous collective, given its output and its inputs."""
    WAIT(result)


def under_way(ops: Sequence[Op]) -> set[int]:
    """Return the outputs of the collectives for which a ``magis.arrived`` waits."""
    return {op.inputs()[0] for op in ops if op.target == ARRIVED}


def followed_by_wait(function: Any) -> Any:
    """Return a function that calls the collective and waits for its output."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return waited(function(*args, **kwargs))

    return call
