"""Sharded weights: a module that holds this rank's shard of each parameter and all-gathers the whole before use.

Torch's `fully_shard` does this in hooks on streams; here the collectives are operators of the step. The capture sees
them, so a plan decides how long a gathered weight stays alive and when it is gathered again. Collectives equal those of
`fully_shard` unit by unit and byte by byte, so sums are bitwise equal:

    forward of a unit    shards -> one flat tensor -> all-gather -> whole parameters
    backward of a unit   gradients -> one flat tensor -> reduce-scatter (mean) -> gradients of the shards

Every parameter is cut along its first dimension and padded with zeros to equal shards: all ranks run the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.errors import UsageError
from magis.ops.collectives import all_gather, all_reduce, reduce_scatter


@dataclass(frozen=True)
class ShardedParameter:
    """Parameter of a unit: its owners among the unit's modules, and its shape when whole."""

    owners: tuple[tuple[str, str], ...]
    """Owners as (module path relative to the unit, parameter name); tied parameters have several."""
    shape: tuple[int, ...]
    trained: bool
    wrap: Callable[[Tensor], Tensor] | None = None
    """Function from the exposed tensor to the tensor that modules use; None: they use the exposed tensor itself."""
    dtype: torch.dtype | None = None
    """Data type to which the reduced gradient is cast; None: no cast."""

    def rows(self, ranks: int) -> int:
        """Return the size of a shard's first dimension, including padding."""
        return -(-self.shape[0] // ranks)

    def length(self, ranks: int) -> int:
        """Return the number of elements of a shard, including padding."""
        return self.rows(ranks) * prod(self.shape[1:])


@dataclass(frozen=True)
class Unit:
    """Parameters that share one collective. Its methods are forward hooks of the module that owns them."""

    pieces: tuple[ShardedParameter, ...]
    ranks: int
    group: str
    """Name of the process group."""

    def shown(self, held: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that modules use in place of their own parameters."""
        raise NotImplementedError

    def returned(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the modules' own parameters; None for a parameter without one."""
        raise NotImplementedError

    def enter(self, module: nn.Module, _args: object) -> None:
        """Forward pre-hook: expose the tensors to use under the names of the modules' parameters."""
        first = (piece.owners[0] for piece in self.pieces)
        held = (module.get_submodule(path)._parameters[name] for path, name in first)
        for piece, tensor in zip(self.pieces, _Shown.apply(self, *held), strict=True):  # type: ignore[no-untyped-call]
            met = tensor if piece.wrap is None else piece.wrap(tensor)
            for path, name in piece.owners:
                module.get_submodule(path).__dict__[name] = met

    def leave(self, module: nn.Module, _args: object, _result: object) -> None:
        """Forward hook: restore the modules' own parameters."""
        for piece in self.pieces:
            for path, name in piece.owners:
                module.get_submodule(path).__dict__.pop(name, None)


class _Shown(torch.autograd.Function):
    """Autograd function from a unit's own parameters to the exposed tensors, with collectives on the gradients."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        shown = unit.shown(held)
        ctx.mark_non_differentiable(*(s for s, piece in zip(shown, unit.pieces, strict=True) if not piece.trained))
        return shown

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.unit.returned(grads)


@dataclass(frozen=True)
class GatheredUnit(Unit):
    """Sharded parameters that are all-gathered together."""

    gathered: torch.dtype | None = None
    """Data type to which shards are cast before the all-gather; None: no cast."""
    reduced: torch.dtype | None = None
    """Data type to which gradients are cast before the reduce-scatter; None: no cast."""

    def shown(self, held: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All-gather the shards, and return the whole parameters."""
        ranks, lengths = self.ranks, [piece.length(self.ranks) for piece in self.pieces]
        flats = [_cast(shard.reshape(-1), self.gathered) for shard in held]
        table = all_gather(flats[0] if len(flats) == 1 else torch.cat(flats), ranks, self.group).view(ranks, -1)
        return tuple(
            table[:, end - length : end].reshape(ranks * piece.rows(ranks), *piece.shape[1:])[: piece.shape[0]]
            for piece, length, end in zip(self.pieces, lengths, accumulate(lengths), strict=True)
        )

    def returned(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Reduce-scatter the gradients, and return this rank's shards of the means; None where there is no gradient."""
        ranks = self.ranks
        given = [(piece, grad) for piece, grad in zip(self.pieces, grads, strict=True) if grad is not None]
        if not given:
            return (None,) * len(grads)
        tables = [
            _cast(_padded(grad, ranks * piece.rows(ranks)), self.reduced).reshape(ranks, -1) for piece, grad in given
        ]
        flat = (tables[0] if len(tables) == 1 else torch.cat(tables, dim=1)).reshape(-1)
        parts = iter(reduce_scatter(flat, ranks, self.group).split([table.shape[1] for table in tables]))
        return tuple(
            None if grad is None else _cast(next(parts), piece.dtype).view(piece.rows(ranks), *piece.shape[1:])
            for piece, grad in zip(self.pieces, grads, strict=True)
        )


class Replica(Unit):
    """Whole parameters whose gradients are all-reduced together."""

    def shown(self, held: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return views of the parameters."""
        return tuple(parameter.view_as(parameter) for parameter in held)

    def returned(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """All-reduce the gradients, and return their means; None for a parameter without gradient."""
        given = [grad for grad in grads if grad is not None]
        if not given or self.ranks == 1:
            return tuple(grads)
        flat = given[0].reshape(-1) if len(given) == 1 else torch.cat([grad.reshape(-1) for grad in given])
        parts = iter(all_reduce(flat, "avg", self.group).split([grad.numel() for grad in given]))
        return tuple(None if grad is None else next(parts).view(grad.shape) for grad in grads)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _padded(grad: Tensor, rows: int) -> Tensor:
    lacking = rows - grad.shape[0]
    return grad if not lacking else functional.pad(grad, [0, 0] * (grad.dim() - 1) + [0, lacking])


def shard_weights(module: nn.Module, blocks: Sequence[str], ranks: int, rank: int, group: str) -> None:
    """Replace the parameters of a module by this rank's shards; each block is a unit, and the rest is one more unit.

    Shards are [rows, ...] and keep the names of the parameters. Raises UsageError for a 0-d parameter.
    """
    for part, named in units(module, blocks):
        pieces = tuple(_sharded(parameter, owners) for parameter, owners in named.items())
        for piece, (parameter, owners) in zip(pieces, named.items(), strict=True):
            if not parameter.dim():
                raise UsageError(
                    f"{'.'.join(owners[0]).strip('.')} is one number, which cannot be cut into shards",
                    hint="make it a tensor of one element, as torch's fully_shard wants it, too",
                )
            whole, rows = parameter.detach(), piece.rows(ranks)
            own = whole[min(rank * rows, len(whole)) :][:rows]
            padded = whole.new_zeros(rows, *whole.shape[1:])
            padded[: len(own)].copy_(own)
            shard = nn.Parameter(padded, parameter.requires_grad)
            for owner, name in owners:
                part.get_submodule(owner)._parameters[name] = shard
        hook_unit(part, GatheredUnit(pieces, ranks, group))


def average_weights(
    module: nn.Module, blocks: Sequence[str], ranks: int, group: str, wrappers: Wrappers | None = None
) -> None:
    """Average the gradients of a module over the ranks of a group, one all-reduce per block and one for the rest.

    ``wrappers`` map a parameter to the function that makes the tensor that modules use.
    """
    for part, named in units(module, blocks):
        pieces = (_sharded(parameter, owners) for parameter, owners in named.items())
        wrapped = [replace(piece, wrap=(wrappers or {}).get(each)) for piece, each in zip(pieces, named, strict=True)]
        hook_unit(part, Replica(tuple(wrapped), ranks, group))


def hook_unit(part: nn.Module, unit: Unit, *, first: bool = False) -> None:
    """Register the forward hooks of a unit on its module; ``first``: before pre-hooks that are already there."""
    part.register_forward_pre_hook(unit.enter, prepend=first)
    part.register_forward_hook(unit.leave)


def _sharded(parameter: nn.Parameter, owners: Sequence[tuple[str, str]]) -> ShardedParameter:
    return ShardedParameter(tuple(owners), tuple(parameter.shape), parameter.requires_grad)


Owners: TypeAlias = "dict[nn.Parameter, list[tuple[str, str]]]"
Wrappers: TypeAlias = "dict[nn.Parameter, Callable[[Tensor], Tensor]]"
"""Parameter that a rank holds -> function that makes the tensor that modules use."""


def units(module: nn.Module, blocks: Sequence[str]) -> list[tuple[nn.Module, Owners]]:
    """Return the blocks of a module, and the module itself, each with its own parameters and their owners."""
    taken: set[nn.Parameter] = set()
    found = []
    for path in (*blocks, ""):
        part = module.get_submodule(path)
        named: Owners = {}
        for owner, holder in _children_first(part):
            for name, parameter in holder._parameters.items():
                if parameter is not None and parameter not in taken:
                    named.setdefault(parameter, []).append((owner, name))
        taken.update(named)
        if named:
            found.append((part, named))
    return found


def _children_first(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their paths, children first: the order in which `fully_shard` concatenates parameters."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module
