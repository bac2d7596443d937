"""ZeRO (Rajbhandari et al. 2020) with DeepSpeed's data types, on the collectives of torch.distributed.

All parameters are in one flat buffer; each rank owns a contiguous part, which may cut parameters anywhere.

* Stage 1 shards the optimizer state. Gradients stay whole; buckets of them are averaged during the backward.
* Stage 2 also shards gradients: they are copied to a bucket as they arrive, and reduced to their owners when it is
full.
* Stage 3 also shards weights: each block is gathered before its forward and again before its backward, and freed
  after both. Parameters below `PERSISTENT` elements stay whole (DeepSpeed's stage3_param_persistence_threshold);
  those outside all blocks (embeddings, heads) are whole from the start of the forward to the end of the backward.

Mixed precision does not use autocast: weights and gradients have the lower type, and the owner of a part keeps a
float32 copy of it beside the optimizer state, and a float32 copy of its gradient during the update.

Stage 3 and `fsdp` differ: under mixed precision, fsdp shards float32 weights and casts them for the all-gather, stage 3
shards the lower type beside float32 masters; fsdp cuts every parameter along its first dimension, stage 3 cuts flat
buffers anywhere; and stage 3 keeps small parameters whole.

Deviations from DeepSpeed: buffers hold parameters in the module's order, the optimizer is torch's and runs on the
pieces of parameters in the part, and the reduction of a bucket blocks the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from magis.capture import Workload
from magis.extensions.ranks.strategies.distributed import (
    PlainStep,
    half,
    held_by,
    make_optimizer,
    of_kind,
    quiet,
    trained,
)
from magis.strategies.rank_step import World, share_of_batch

BUCKET_ELEMENTS = 500_000_000
"""Default of DeepSpeed's reduce_bucket_size, in elements."""
PERSISTENT = 100_000
"""Default of DeepSpeed's stage3_param_persistence_threshold, in elements."""


@dataclass(frozen=True)
class Zero:
    """Strategy `zero1`, `zero2` or `zero3`; ``amp``: weights and gradients in half precision, float32 master weights.

    Bytes per parameter with Adam on R ranks, without buckets. float32: 4 + 4 + 8/R, 4 + 4/R + 8/R, 16/R. ``amp``: 2 + 2
    + 12/R, 2 + 2/R + 12/R, 16/R; 4/R more during the update.
    """

    stage: int
    amp: bool = False
    bucket_elements: int = BUCKET_ELEMENTS
    persistent: int = PERSISTENT

    group = 1
    warm_steps = 1

    @property
    def name(self) -> str:
        return f"amp+zero{self.stage}" if self.amp else f"zero{self.stage}"

    def prepare(self, work: Workload, world: World) -> PlainStep:
        """Return the step on this rank's share of the batch."""
        share = share_of_batch(work, world.rank, world.size)
        dtype = half(world) if self.amp else next(work.module.parameters()).dtype
        flats = _cut(self, work, dtype)  # masters are copied before weights are cast
        if self.amp:
            share = _lowered(share, dtype)
        return _Partitioned(self, share, flats).step(world)


def _lowered(work: Workload, dtype: torch.dtype) -> Workload:
    """Return the workload with buffers and batch cast to the lower type; parameters are cast in their flat buffers."""

    def lower(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    for module in work.module.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = lower(buffer)
    return replace(work, inputs=tuple(map(lower, work.inputs)), targets=tuple(map(lower, work.targets)))


def _cut(strategy: Zero, work: Workload, dtype: torch.dtype) -> list[FlatBuffer]:
    named = trained(work.module)
    if strategy.stage < 3:
        return [FlatBuffer(named, dtype)]
    small = {name: p for name, p in named.items() if p.numel() < strategy.persistent}
    units = [FlatBuffer(small, dtype)] if small else []
    taken = set(small)
    inside = [{n: p for n, p in named.items() if n.startswith(f"{block}.") and n not in small} for block in work.blocks]
    taken.update(*inside)
    rest = {name: p for name, p in named.items() if name not in taken}
    return [*units, *(FlatBuffer(unit, dtype, sharded=True) for unit in (*inside, rest) if unit)]


Piece = tuple[str, int, int, int]
"""Piece of a parameter: its name, its start in the parameter, its start in the rank's part, its number of elements."""


class FlatBuffer:
    """Parameters as views of one flat buffer, padded to a multiple of the ranks; each rank owns one contiguous part.

    ``dtype`` is the type of weights and gradients; if it differs from the parameters' own, ``master`` is this rank's
    part in float32, else the part itself. With ``sharded``, the part is a separate tensor, and the whole buffer has
    memory only between `gather` and `release`. Tensors saved by autograd are views of the buffer.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], dtype: torch.dtype, *, sharded: bool = False) -> None:
        self.named = dict(named)
        self.sharded = sharded
        count, rank = dist.get_world_size(), dist.get_rank()
        total = sum(p.numel() for p in self.named.values())
        self.length = -(-total // count)
        first = next(iter(self.named.values()))
        with torch.no_grad():
            whole = torch.zeros(self.length * count, dtype=first.dtype, device=first.device)
            for parameter, start in self._starts():
                whole[start : start + parameter.numel()].copy_(parameter.detach().reshape(-1))
            mine = slice(rank * self.length, (rank + 1) * self.length)
            self.whole = whole.to(dtype)
            own = self.whole[mine]
            self.own = own.clone() if sharded else own
            self.master = self.own if dtype == first.dtype else whole[mine].clone()
            for parameter, start in self._starts():
                parameter.data = self.whole[start : start + parameter.numel()].view(parameter.shape)
        self._first = rank * self.length
        self._nbytes = self.whole.untyped_storage().nbytes()
        self._held = True
        if sharded:
            self.release()

    def _starts(self) -> Iterator[tuple[nn.Parameter, int]]:
        start = 0
        for parameter in self.named.values():
            yield parameter, start
            start += parameter.numel()

    def start(self, parameter: nn.Parameter) -> int:
        """Return the offset of a parameter in the whole buffer."""
        return next(start for each, start in self._starts() if each is parameter)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of parameters in this rank's part."""
        for (name, parameter), (_, start) in zip(self.named.items(), self._starts(), strict=True):
            low = max(start, self._first)
            high = min(start + parameter.numel(), self._first + self.length)
            if low < high:
                yield name, low - start, low - self._first, high - low

    def gather(self) -> None:
        """All-gather the whole buffer, unless it is already gathered."""
        if self.sharded and not self._held:
            self.whole.untyped_storage().resize_(self._nbytes)
            self._collect()
            self._held = True

    def release(self) -> None:
        """Free the memory of the whole buffer."""
        if self.sharded and self._held:
            self.whole.untyped_storage().resize_(0)
            self._held = False

    def spread_update(self) -> None:
        """Cast this rank's updated part to the lower type; unless sharded, all-gather the parts of all ranks."""
        with torch.no_grad():
            if self.master is not self.own:
                self.own.copy_(self.master)
        if not self.sharded:
            self._collect()

    def _collect(self) -> None:
        # `.data` has its own version counter, so autograd sees no in-place write to saved tensors
        with quiet(), torch.no_grad():
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(self.whole.data, self.own)

    def reduce(self, grads: Mapping[str, Tensor | None]) -> Tensor:
        """Reduce-scatter the gradients, and return this rank's part of the mean; missing gradients count as zeros."""
        count = dist.get_world_size()
        with of_kind("communication buckets"):
            flat = torch.zeros(self.length * count, dtype=self.own.dtype, device=self.own.device)
        for (name, parameter), (_, start) in zip(self.named.items(), self._starts(), strict=True):
            grad = grads.get(name)
            if grad is not None:
                flat[start : start + parameter.numel()].copy_(grad.reshape(-1))
        flat.div_(count)
        with of_kind("gradients"):
            mine = torch.empty_like(self.own)
        with quiet():
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(mine, flat)
        return mine


class _Partitioned:
    """Flat buffers of one rank, with the hooks that move gradients into them."""

    def __init__(self, strategy: Zero, work: Workload, flats: list[FlatBuffer]) -> None:
        self._strategy = strategy
        self._module = work.module
        self._work = work
        self._flats = flats
        self._masters = {
            name: flat.master[place : place + length] for flat in flats for name, _, place, length in flat.pieces()
        }
        self._optimizer: Optimizer = make_optimizer(work, self._masters, strategy.name)
        self._parts: dict[int, Tensor] = {}
        """This rank's parts of the gradient, by index of the flat buffer."""

    def step(self, world: World) -> PlainStep:
        strategy = self._strategy
        before: Callable[[], None] | None = None
        if strategy.stage == 3:
            before = self._hook_blocks()
            for number, flat in enumerate(self._flats):
                self._hook_unit(number, flat)
            finish = self._end_backward
        else:
            buckets = _Buckets(self._flats[0], strategy, self._parts)
            before, finish = buckets.start, buckets.finish
        return _ZeroStep(
            self._module, self._work, self._optimizer, world, strategy.amp, self._module,
            before_forward=before, after_backward=lambda: self._hand_gradients(finish),
            after_update=self._spread_update, autocast=False, flats=self._flats, parts=self._parts,
        )  # fmt: skip

    def _hand_gradients(self, finish: Callable[[], None]) -> None:
        """Finish the backward, and set the masters' gradients to pieces of the reduced gradient, in their data type."""
        finish()
        for number, flat in enumerate(self._flats):
            part = self._parts.get(number)
            if part is not None:
                with of_kind("gradients"):
                    whole = part.to(flat.master.dtype)
                for name, _, place, length in flat.pieces():
                    self._masters[name].grad = whole[place : place + length]
            else:  # stage 1: gradients are in `parameter.grad`
                for name, start, _, length in flat.pieces():
                    grad = flat.named[name].grad
                    if grad is not None:
                        with of_kind("gradients"):
                            piece = grad.reshape(-1)[start : start + length].to(flat.master.dtype)
                        self._masters[name].grad = piece

    def _spread_update(self) -> None:
        for flat in self._flats:
            flat.spread_update()

    # Stage 3.

    def _hook_blocks(self) -> Callable[[], None]:
        """Hook each block to gather and release its weights; return a function that gathers the other parameters."""
        rest = list(self._flats)
        for block in self._work.blocks:
            inside = (f for f in rest if f.sharded and next(iter(f.named)).startswith(f"{block}."))
            flat = next(inside, None)
            if flat is not None:
                rest.remove(flat)
                _hook_block(self._module.get_submodule(block), flat)

        def start() -> None:
            for flat in rest:
                flat.gather()

        return start

    def _hook_unit(self, number: int, flat: FlatBuffer) -> None:
        missing: set[str] = set(flat.named)

        def arrived(name: str) -> None:
            missing.discard(name)
            if not missing:
                self._reduce(number)
                missing.update(flat.named)

        for name, parameter in flat.named.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived(name))

    def _reduce(self, number: int) -> None:
        flat = self._flats[number]
        self._parts[number] = flat.reduce({name: p.grad for name, p in flat.named.items()})
        for parameter in flat.named.values():
            parameter.grad = None
        flat.release()

    def _end_backward(self) -> None:
        """Reduce the units that lack some gradient; all ranks run one network, so they find the same units."""
        for number in range(len(self._flats)):
            if number not in self._parts:
                self._reduce(number)


def _hook_block(block: nn.Module, flat: FlatBuffer) -> None:
    def again(grad: Tensor) -> Tensor:
        flat.gather()
        return grad

    def after(_module: nn.Module, _inputs: object, output: object) -> None:
        flat.release()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(again)

    block.register_forward_pre_hook(lambda _module, _inputs: flat.gather())
    block.register_forward_hook(after)


class _Buckets:
    """Gradient bucket of stages 1 and 2: reduces gradients as they arrive during the backward."""

    def __init__(self, flat: FlatBuffer, strategy: Zero, parts: dict[int, Tensor]) -> None:
        self._flat = flat
        self._shards = strategy.stage == 2
        self._parts = parts
        self._size = min(strategy.bucket_elements, sum(p.numel() for p in flat.named.values()))
        self._bucket: Tensor | None = None
        self._filled: list[tuple[str, int]] = []
        self._used = 0
        for name, parameter in flat.named.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._arrived(name, p))

    def start(self) -> None:
        """Start a step with an empty bucket."""
        self._filled, self._used = [], 0

    def _arrived(self, name: str, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:
            return
        own = self._flat.own
        if self._bucket is None:
            with of_kind("communication buckets"):
                self._bucket = torch.empty(self._size, dtype=own.dtype, device=own.device)
            if self._shards:
                with of_kind("gradients"):
                    self._parts[0] = torch.zeros_like(own)
        if self._used + grad.numel() > self._size:
            self._flush()
        if grad.numel() > self._size:  # larger than a bucket: by itself, in place
            flat = grad.reshape(-1)
            self._reduce([(name, 0)], flat)
            if not self._shards and flat.data_ptr() != grad.data_ptr():
                grad.copy_(flat.view_as(grad))
        else:
            self._bucket[self._used : self._used + grad.numel()].copy_(grad.reshape(-1))
            self._filled.append((name, self._used))
            self._used += grad.numel()
        if self._shards:
            parameter.grad = None

    def _flush(self) -> None:
        if self._filled and self._bucket is not None:
            self._reduce(self._filled, self._bucket[: self._used])
            if not self._shards:
                for name, place in self._filled:
                    grad = self._flat.named[name].grad
                    if grad is not None:
                        grad.copy_(self._bucket[place : place + grad.numel()].view_as(grad))
        self._filled, self._used = [], 0

    def _reduce(self, filled: list[tuple[str, int]], bucket: Tensor) -> None:
        bucket.div_(dist.get_world_size())
        if not self._shards:
            dist.all_reduce(bucket)
            return
        rank, length = dist.get_rank(), self._flat.length
        for name, place in filled:
            parameter = self._flat.named[name]
            start = self._flat.start(parameter)
            for owner, low, high in _owners(start, parameter.numel(), length):
                part = bucket[place + low - start : place + high - start]
                dist.reduce(part, dst=owner)
                if owner == rank:
                    self._parts[0][low - owner * length : high - owner * length].copy_(part)

    def finish(self) -> None:
        """Reduce the rest of the bucket after the backward, and free the bucket."""
        self._flush()
        self._bucket = None


def _owners(start: int, count: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, start, end) for the owners of elements `start` to `start + count` of a flat buffer."""
    low, end = start, start + count
    while low < end:
        owner = low // length
        high = min(end, (owner + 1) * length)
        yield owner, low, high
        low = high


@dataclass
class _ZeroStep(PlainStep):
    flats: Sequence[FlatBuffer] = ()
    parts: dict[int, Tensor] = field(default_factory=dict)

    def prepare(self) -> None:
        """Clear gradients, and this rank's reduced parts of them."""
        super().prepare()
        self.parts.clear()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        for flat in self.flats:
            yield "parameters", flat.own
            if flat.master is not flat.own:
                yield "optimizer state", flat.master
        yield from (("gradients", part) for part in self.parts.values())
        yield from held_by(self.module, self.optimizer, self.work)
