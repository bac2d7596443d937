"""Parts of distributed strategies: mixed precision, loss scaling, averaged gradients, float32 master weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from magis.capture import Workload
from magis.errors import UsageError
from magis.ops.optimizers import OptimizerSpec, torch_optimizer
from magis.strategies.rank_step import RankStep, RankStrategy, World, Wrapping, batch_size, check_update, split

K = TypeVar("K")
BUCKET_BYTES = 25 * 2**20
"""Size in bytes of the buckets for averaging gradients: torch's default for DistributedDataParallel."""

KIND: ContextVar[str | None] = ContextVar("KIND", default=None)
"""Kind of the storages allocated now, for the memory table; None: activations and temporaries."""


@contextmanager
def of_kind(name: str) -> Iterator[None]:
    """Label the storages allocated within a `with` block with a kind, such as "communication buckets"."""
    token = KIND.set(name)
    try:
        yield
    finally:
        KIND.reset(token)


def half(world: World) -> torch.dtype:
    """Return the lower data type of mixed precision: bfloat16 on a CPU, float16 on a GPU."""
    return torch.float16 if world.device == "cuda" else torch.bfloat16


def place(world: World) -> str:
    """Return the device type of the rank's tensors; fake tensors are always on the CPU."""
    return "cpu" if world.fake else world.device


def cast(world: World, *, amp: bool) -> AbstractContextManager[Any]:
    """Return a context of autocast to the lower data type; a null context without ``amp``."""
    return torch.autocast(place(world), dtype=half(world)) if amp else nullcontext()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings (of deprecated names, for example) within a `with` block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def mesh(world: World, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a device mesh with named dimensions; its own tensors are real even under fake tensor modes."""
    forget_meshes()
    with _disable_current_modes(), quiet():
        return init_device_mesh(place(world), tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def forget_meshes() -> None:
    """Clear torch's caches of operators on meshes, which refer to destroyed process groups."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's local part of a DTensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, tied parameters once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def rule_of(work: Workload, names: Container[str]) -> OptimizerSpec:
    """Return the optimizer of ``work`` restricted to the parameters of these names."""
    groups = (replace(g, parameters=tuple(n for n in g.parameters if n in names)) for g in work.optimizer.groups)
    return replace(work.optimizer, groups=tuple(groups))


def make_optimizer(work: Workload, params: Mapping[str, Tensor], strategy: str) -> Optimizer:
    """Return a torch optimizer for these parameters, as ``work`` specifies. Raises UsageError if it specifies none."""
    check_update(work, strategy)
    rule = rule_of(work, params)
    with quiet():  # a stage may well be left without a parameter of some group
        optimizer = torch_optimizer(rule, params)
    if optimizer is None:
        raise UsageError(
            f"{strategy} runs whole training steps; the optimizer of {work.name} is {rule.kind!r}",
            hint="give the workload an optimizer of kind sgd, momentum, adam or adamw",
        )
    return optimizer


def average_gradients(
    parameters: Iterable[Tensor], group: dist.ProcessGroup | None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace the gradients by their means over the ranks of ``group`` (None: all), in flat buckets, last ones first.

    Every rank has gradients of the same parameters. One bucket of about ``bucket_bytes`` is alive at a time; a larger
    gradient is reduced in place, without a bucket.
    """
    count = dist.get_world_size(group)
    if count == 1:
        return
    grads = {number: local(p.grad) for number, p in enumerate(reversed(list(parameters))) if p.grad is not None}
    for numbers in buckets(grads, bucket_bytes):
        bucket = [grads[number] for number in numbers]
        if len(bucket) == 1 and bucket[0].is_contiguous():
            bucket[0].div_(count)
            dist.all_reduce(bucket[0], group=group)
            continue
        with of_kind("communication buckets"):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
        flat.div_(count)
        dist.all_reduce(flat, group=group)
        for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
        del flat, part


def buckets(grads: Mapping[K, Tensor], most_bytes: int) -> Iterator[list[K]]:
    """Yield buckets of gradients with one data type and at most ``most_bytes``, or a single larger gradient."""
    bucket: list[K] = []
    held = 0
    for name, grad in grads.items():
        nbytes = grad.numel() * grad.element_size()
        if bucket and (grad.dtype != grads[bucket[0]].dtype or held + nbytes > most_bytes):
            yield bucket
            bucket, held = [], 0
        bucket.append(name)
        held += nbytes
    if bucket:
        yield bucket


class LossScaler:
    """Dynamic loss scaling by the rule of `torch.amp.GradScaler`, for sharded gradients.

    Unless the gradients of all ranks are finite, no rank updates its weights. On fake tensors, gradients count as
    finite. If not ``enabled`` (bfloat16 and float32), nothing is scaled.
    """

    def __init__(self, world: World, *, enabled: bool, first: float = 2.0**16, interval: int = 2000) -> None:
        self._world = world
        self._enabled = enabled
        self._scale = first if enabled else 1.0
        self._interval = interval
        self._good = 0

    @property
    def scale(self) -> float:
        """Current factor of the loss."""
        return self._scale

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, for the backward."""
        return loss * self._scale if self._enabled else loss

    def step(self, optimizer: Optimizer, grads: Iterable[Tensor]) -> None:
        """Unscale the gradients in place, run the optimizer if all are finite, and update the scale."""
        if self._enabled and not self._unscale(list(grads)):
            self._scale, self._good = max(self._scale / 2, 1.0), 0
            return
        with quiet():
            optimizer.step()
        if self._enabled:
            self._good += 1
            if self._good % self._interval == 0:
                self._scale *= 2

    def _unscale(self, grads: list[Tensor]) -> bool:
        """Unscale the gradients in place, and return True if they are finite on all ranks."""
        device = place(self._world)
        found = torch.zeros(1, device=device)
        inverse = torch.full((1,), 1 / self._scale, device=device)
        for grad in grads:
            torch._amp_foreach_non_finite_check_and_unscale_([grad], found, inverse)
        if self._world.size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return self._world.fake or found.item() == 0


@dataclass
class PlainStep:
    """Step of forward, loss, backward and update on this rank, with a strategy's callbacks in between."""

    module: nn.Module
    """This rank's part of the network, which `call` may wrap."""
    work: Workload
    """Workload with this rank's share of the batch and this rank's module."""
    optimizer: Optimizer
    world: World
    amp: bool
    call: nn.Module
    before_forward: Callable[[], None] | None = None
    after_backward: Callable[[], None] | None = None
    after_update: Callable[[], None] | None = None
    autocast: bool = True
    """True if lower precision comes from autocast; else the weights themselves have the lower data type."""
    micro_batches: int = 1
    """Number of micro-batches, each with forward and backward; replicas average gradients after the last."""

    def __post_init__(self) -> None:
        self._scaler = LossScaler(self.world, enabled=self.amp and self.world.device == "cuda")

    def scale(self, scaler: LossScaler) -> None:
        """Replace the loss scaler."""
        self._scaler = scaler

    def prepare(self) -> None:
        """Set gradients to None."""
        self.optimizer.zero_grad(set_to_none=True)
        self.module.zero_grad(set_to_none=True)

    def run(self) -> Tensor:
        """Run one whole step, and return the mean loss of the rank's share."""
        if self.before_forward is not None:
            self.before_forward()
        loss = self._forward_backward()
        if self.after_backward is not None:
            self.after_backward()
        self._scaler.step(self.optimizer, gradients(self.optimizer))
        if self.after_update is not None:
            self.after_update()
        return loss

    def _forward_backward(self) -> Tensor:
        """Run forward and backward of all micro-batches, and return the mean loss."""
        work, count = self.work, self.micro_batches
        if count == 1:
            return self._run_micro_batch(work.inputs, work.targets)
        parts = (split(tensors, batch_size(work), count) for tensors in (work.inputs, work.targets))
        losses = []
        for number, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            later = getattr(self.call, "no_sync", None) if number + 1 < count else None
            with nullcontext() if later is None else later():
                losses.append(self._run_micro_batch(inputs, targets))
        return torch.stack(losses).sum()

    def _run_micro_batch(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Run forward and backward of a micro-batch, and return its contribution to the mean loss, detached."""
        with cast(self.world, amp=self.amp and self.autocast), quiet():
            loss = self.work.loss_fn(self.call(*inputs), *targets)
            if self.micro_batches > 1:
                loss = loss / self.micro_batches
        with quiet():
            self._scaler.scaled(loss).backward()
        found: Tensor = loss.detach()
        return found

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) for all tensors that this rank keeps alive between operators."""
        yield from held_by(self.module, self.optimizer, self.work)


def gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield this rank's parts of the gradients that the optimizer reads."""
    for group in optimizer.param_groups:
        yield from (local(p.grad) for p in group["params"] if p.grad is not None)


def held_by(module: nn.Module, optimizer: Optimizer, work: Workload) -> Iterator[tuple[str, Tensor]]:
    """Yield (kind, tensor) for parameters, buffers, batch, optimizer state and gradients."""
    yield from (("parameters", local(p)) for p in module.parameters())
    yield from (("buffers", b) for b in module.buffers())
    yield from (("batch", t) for t in (*work.inputs, *work.targets))
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps its part's state in there
    for state in inner.state.values():
        yield from (("optimizer state", local(t)) for t in state.values() if isinstance(t, Tensor))
    masters = getattr(optimizer, "held", None)
    yield from masters() if masters is not None else ()
    owned = [p for group in inner.param_groups for p in group["params"]]
    yield from (("gradients", local(p.grad)) for p in (*module.parameters(), *owned) if p.grad is not None)


@dataclass(frozen=True)
class Accumulated(Wrapping):
    """Gradient accumulation (`accumulate4+fsdp`): another strategy with several micro-batches per step.

    A replica of `ddp` averages gradients after the last micro-batch (`no_sync`), `fsdp` reduces those of each; a
    pipeline uses its own micro-batches. Loss and gradients equal those of the whole share if the loss is a mean over
    equally many numbers in each micro-batch, and the network has no batch norm.
    """

    strategy: RankStrategy
    micro_batches: int

    @property
    def name(self) -> str:
        return f"accumulate{self.micro_batches}+{self.strategy.name}"

    def prepare(self, work: Workload, world: World) -> RankStep:
        """Return the inner strategy's step. Raises UsageError if the share does not divide into equal micro-batches."""
        if self.stages > 1:
            return _in_micro_batches(self.strategy, self.micro_batches).prepare(work, world)
        step: Any = self.strategy.prepare(work, world)
        samples = batch_size(step.work)
        if samples % self.micro_batches:
            raise UsageError(
                f"{work.name}: a share of {samples} samples has no {self.micro_batches} equal micro-batches",
                hint="accumulate as many as divide it",
            )
        step.micro_batches = self.micro_batches
        found: RankStep = step
        return found


def _in_micro_batches(strategy: Any, count: int) -> RankStrategy:
    """Return the pipeline strategy with another number of micro-batches, also inside a half-precision strategy."""
    if isinstance(strategy, Halved):
        return replace(strategy, strategy=_in_micro_batches(strategy.strategy, count))
    found: RankStrategy = replace(strategy, micro_batches=count)
    return found


# Mixed precision without autocast, as in Megatron-LM, for the strategies that otherwise use autocast. Weights,
# activations and gradients have the lower type; float32 master weights and the optimizer's state exist beside them. For
# the update every gradient is cast to float32 and freed; the optimizer updates the masters, which are then copied to
# the weights. Bytes per parameter with Adam: 2 + 4 + 8 always, 2 at the end of the backward (2 more in a bucket under
# ddp), instead 4 during the update.


@dataclass(frozen=True)
class Halved(Wrapping):
    """Half precision with float32 master weights (`half+ddp`, `half+tp2`, `half+pp2`, ...) around another strategy."""

    strategy: RankStrategy

    @property
    def name(self) -> str:
        return f"half+{self.strategy.name}"

    def prepare(self, work: Workload, world: World) -> RankStep:
        """Return the inner strategy's step on the network in half precision, with an optimizer of master weights."""
        dtype = half(world)
        step: Any = self.strategy.prepare(work.to(str(dtype).removeprefix("torch.")), world)
        weights = trained(step.module)
        step.optimizer = Masters(weights, lambda masters: make_optimizer(step.work, masters, self.name))
        step.scale(LossScaler(world, enabled=world.device == "cuda"))
        found: RankStep = step
        return found


class Masters(Optimizer):
    """Optimizer of half-precision weights through float32 master copies; ``make`` creates the masters' optimizer."""

    def __init__(self, weights: Mapping[str, nn.Parameter], make: Callable[[Mapping[str, Tensor]], Optimizer]) -> None:
        super().__init__([{"params": list(weights.values())}], {})
        self._pairs = [
            (weight, nn.Parameter(weight.detach().float().clone(), weight.requires_grad)) for weight in weights.values()
        ]
        self._inner = make(dict(zip(weights, (master for _, master in self._pairs), strict=True)))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters with the weights' gradients, which are freed, and copy the masters to the weights."""
        loss = None if closure is None else closure()
        for weight, master in self._pairs:
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
            weight.grad = None
        self._inner.step()
        with torch.no_grad():
            for weight, master in self._pairs:
                weight.copy_(master)
                master.grad = None
        return loss

    def held(self) -> list[tuple[str, Tensor]]:
        """Return (kind, tensor) for the master weights and their optimizer state."""
        found = [("master weights", local(master)) for _, master in self._pairs]
        for state in self._inner.state.values():
            found += [("optimizer state", local(item)) for item in state.values() if isinstance(item, Tensor)]
        return found
