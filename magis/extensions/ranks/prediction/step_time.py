"""Estimated time of one rank's step: its operators at a device's prices, and its collectives over the links.

The estimate compares strategies and is not gated: it ignores contention and host time between kernels. Its inputs are
the constants of devices (magis/cost/devices.py) and links (magis/cost/links.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from magis.capture import Workload
from magis.cost.devices import DeviceModel
from magis.cost.links import Links, links_of
from magis.cost.operator_latency import roofline_ns
from magis.extensions.ranks.prediction.rank_memory import predict_rank
from magis.extensions.ranks.strategies.model_parallel import PipelineStep
from magis.extensions.ranks.strategies.schedules import COMPUTED, Waiting
from magis.graph import Op, Ref, Value
from magis.ops.call import from_torch
from magis.results import RankMemory
from magis.strategies.rank_step import RankStep, RankStrategy, World, Wrapping

_BY_TORCH = ("ddp", "oss")
"""Strategies on DistributedDataParallel, whose collectives no dispatch mode sees."""
_ONCE = frozenset({"broadcast_", "reduce_", "send", "scatter_", "gather_"})
_SHARED = frozenset(
    {"_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "all_gather_into_tensor"}
    | {"_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor"}
    | {"alltoall_base_", "alltoall_", "all_to_all_single", "all_gather_into_tensor_out"}
)
_TWICE = frozenset({"allreduce_", "all_reduce", "all_reduce_", "allreduce_coalesced_"})


class StepTime(TorchDispatchMode):
    """Dispatch mode that sums up the predicted time of all operators."""

    def __init__(self, device: DeviceModel, links: Links) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._links = links
        self._watching = True
        self._entered = False
        self.compute_ns: int = 0
        self.exposed_ns: float = 0.0
        """Nanoseconds of exposed communication (blocking)."""
        self.hidden_ns: float = 0.0
        """Nanoseconds of communication that can overlap with computation."""
        self.sends: int = 0
        """Number of sends between pipeline stages."""
        self.sent_ns: float = 0.0
        """Nanoseconds of sends between pipeline stages, included in ``exposed_ns``."""
        self.took: dict[tuple[int, str], float] = {}
        """Nanoseconds of a pipeline's stages by (stage, kind of computation), included in ``compute_ns``."""
        self._updating = 0
        """Number of nested optimizer steps that are running; the backward is over then, so communication is exposed."""
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._entered = True
        self.watching = self._watching
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.watching = self._entered = False

    @property
    def watching(self) -> bool:
        """True while operators are counted. Only then are optimizers hooked, since some cannot be."""
        return self._watching

    @watching.setter
    def watching(self, on: bool) -> None:
        self._watching = on
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if on and self._entered:
            self._hooks = [
                register_optimizer_step_pre_hook(lambda *_: self._update(1)),
                register_optimizer_step_post_hook(lambda *_: self._update(-1)),
            ]

    def _update(self, by: int) -> None:
        self._updating += by

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its parts' operators come by
        result = func(*args, **(kwargs or {}))
        if not self.watching:
            return result
        space, _, name = str(func._schema.name).partition("::")
        if space in ("c10d", "_c10d_functional"):
            self._add_message(func, name, args, result)
        elif space == "aten":
            took = _call_ns(self._device, func, args, kwargs or {}, result)
            self.compute_ns += took
            if (at := COMPUTED.get()) is not None:
                self.took[at] = self.took.get(at, 0.0) + took
        return result

    def ms(self, waiting: Waiting | None = None, *, passes: int = 1) -> float:
        """Return the milliseconds of the whole step.

        ``waiting``: idle time of a pipeline's rank. Asynchronous communication overlaps with the last of ``passes``.
        """
        compute, exposed = float(self.compute_ns), self.exposed_ns
        if waiting is not None:
            compute += waiting.idle_ns(self.compute_ns, self.took, self.sent_ns / max(1, self.sends))
            exposed -= self.sent_ns if waiting.sends_ahead else 0.0
        beside = max(0.0, self.hidden_ns - self._links.hidden * compute / passes)
        return (compute + exposed + beside) / 1e6

    def add_hidden(self, nbytes: int, ranks: int) -> None:
        """Add a gradient all-reduce of DistributedDataParallel, which no dispatch mode sees."""
        self.hidden_ns += 2 * (ranks - 1) / ranks * nbytes / self._links.bytes_per_s * 1e9

    def _add_message(self, func: Any, name: str, args: tuple[Any, ...], result: object) -> None:
        ranks = _group_size(args)
        if ranks < 2:
            return
        factor = 2 * (ranks - 1) / ranks if name in _TWICE else (ranks - 1) / ranks if name in _SHARED else 0.0
        if name in _ONCE:
            factor = 1.0
        if not factor:  # waits, barriers, and receives, which are counted as sends
            return
        sizes = [*map(_nbytes, args[:2]), _nbytes(result) if name in _SHARED else 0]  # the whole, not the pieces
        took = self._links.ns(factor * max(sizes))
        if _is_asynchronous(func, args) and not self._updating:
            self.hidden_ns += took
        else:
            self.exposed_ns += took
        if name == "send":
            self.sends += 1
            self.sent_ns += took


def predict_step(
    strategy: RankStrategy,
    make_work: Callable[[], Workload],
    world_size: int,
    rank: int,
    device: DeviceModel,
    kind: str = "cpu",
) -> tuple[RankMemory, float]:
    """Predict memory and milliseconds of a step of rank ``rank``, in one run on fake tensors (see `predict_rank`).

    ``device`` gives prices and links, ``kind`` ("cpu", "cuda") the operators.
    """
    pace = StepTime(device, links_of(device.name))
    seen = _ObservedStrategy(strategy)
    memory = predict_rank(seen, make_work, world_size, rank, device=kind, watched_by=pace, capability=device.capability)
    passes = 1
    if strategy.name.rpartition("+")[2] in _BY_TORCH:
        pace.add_hidden(seen.trained_bytes, world_size)
        passes = int(getattr(strategy, "micro_batches", 1))  # whose gradients are sent with the last one
    return memory, pace.ms(seen.waiting, passes=passes)


@dataclass
class _ObservedStrategy(Wrapping):
    """Strategy that records facts about its step that operators do not show."""

    strategy: RankStrategy
    trained_bytes: int = 0
    waiting: Waiting | None = None
    """Idle time of a pipeline's rank; None without a pipeline."""

    def prepare(self, work: Workload, world: World) -> RankStep:
        step = self.strategy.prepare(work, world)
        self.trained_bytes = sum(p.nbytes for p in step.module.parameters() if p.requires_grad)
        if isinstance(step, PipelineStep):
            self.waiting = step.waiting
        return step


def _call_ns(device: DeviceModel, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the nanoseconds of one call, priced like an operator of a graph."""
    values: dict[int, Value] = {}

    def known(item: Any) -> Any:
        if isinstance(item, Tensor):
            number = len(values)
            storage = item.untyped_storage()._cdata
            shape, stride = tuple(map(int, item.shape)), tuple(map(int, item.stride()))
            values[number] = Value(number, shape, stride, str(item.dtype).removeprefix("torch."), storage)
            return Ref(number)
        if isinstance(item, (list, tuple)):
            return tuple(map(known, item))
        return None if isinstance(item, torch.Generator) else from_torch(item)

    given = tuple(map(known, args)), tuple((key, known(value)) for key, value in kwargs.items())
    inputs = {value.storage for value in values.values()}
    outputs = tuple(known(leaf).value for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
    if func.is_view:
        return device.view_ns
    writes = tuple((values[v].storage, 1) for v in outputs if values[v].storage in inputs and func._schema.is_mutable)
    target = f"aten.{func._schema.name.partition('::')[2]}.{func._schema.overload_name or 'default'}"
    op = Op(0, target, given[0], given[1], outputs, writes=writes)
    return roofline_ns(device, op, values)


def _is_asynchronous(func: Any, args: tuple[Any, ...]) -> bool:
    """Return the ``async_op`` argument of a collective, or its default, since defaults are not passed on."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "async_op":
            return bool(args[index] if index < len(args) else argument.default_value)
    return False


def _nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _group_size(args: tuple[Any, ...]) -> int:
    """Return the number of ranks in a collective's group; 1 if no argument is a group."""
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    for arg in args:
        if isinstance(arg, str | torch.ScriptObject):
            with suppress(RuntimeError, ValueError, LookupError, TypeError):
                return int((resolve(arg) if isinstance(arg, str) else dist.ProcessGroup.unbox(arg)).size())
    return 1
