"""Weights in shards: a module that holds this rank's part of each parameter and gathers the whole where it uses it.

torch's `fully_shard` does this by hooks on streams; here it is operators of the step itself: the capture sees them, so
that a plan decides how long a gathered weight stays and when it is gathered again. The messages are those of
`fully_shard`, unit by unit and byte by byte, hence the same sums:

    forward of a unit    shards -> one flat tensor -> all-gather -> whole parameters
    backward of a unit   gradients -> one flat tensor -> reduce-scatter (mean) -> gradients of the shards

Every parameter is cut along its first dimension, and padded with zeros to equal shards: all ranks run the same step.
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
    """One parameter of a unit: where the unit's module and those below it hold it, and its shape when whole."""

    owners: tuple[tuple[str, str], ...]
    """Paths of modules, from the unit's, and the names that the parameter has there; tied ones have several."""
    shape: tuple[int, ...]
    trained: bool
    wrap: Callable[[Tensor], Tensor] | None = None
    """Function from the shown tensor to the one that modules use; None: they use the shown one."""
    dtype: torch.dtype | None = None
    """Data type to which gradients are cast in the end; None: they are not."""

    def rows(self, ranks: int) -> int:
        """Return the first dimension of a shard, with the padding that makes all of them equal."""
        return -(-self.shape[0] // ranks)

    def length(self, ranks: int) -> int:
        """Return the number of elements of a shard."""
        return self.rows(ranks) * prod(self.shape[1:])


@dataclass(frozen=True)
class Unit:
    """Parameters that go into one message. Its methods are hooks of the module that they belong to."""

    pieces: tuple[ShardedParameter, ...]
    ranks: int
    group: str
    """Name of the process group."""

    def shown(self, held: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that the modules use in place of the parameters that they hold."""
        raise NotImplementedError

    def returned(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the parameters that the modules hold; None for one without."""
        raise NotImplementedError

    def enter(self, module: nn.Module, _args: object) -> None:
        """Put the shown tensors, before a forward, where the modules look for their parameters."""
        first = (piece.owners[0] for piece in self.pieces)
        held = (module.get_submodule(path)._parameters[name] for path, name in first)
        for piece, tensor in zip(self.pieces, _Shown.apply(self, *held), strict=True):  # type: ignore[no-untyped-call]
            met = tensor if piece.wrap is None else piece.wrap(tensor)
            for path, name in piece.owners:
                module.get_submodule(path).__dict__[name] = met

    def leave(self, module: nn.Module, _args: object, _result: object) -> None:
        """Put the parameters themselves back after a forward."""
        for piece in self.pieces:
            for path, name in piece.owners:
                module.get_submodule(path).__dict__.pop(name, None)


class _Shown(torch.autograd.Function):
    """The tensors that a unit shows, with their gradients returned to the parameters."""

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
    """Parameters in shards, which are gathered together."""

    gathered: torch.dtype | None = None
    """Data type to which shards are cast before they are gathered; None: they are not."""
    reduced: torch.dtype | None = None
    """Data type to which gradients are cast before they are reduced; None: they are not."""

    def shown(self, held: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the whole parameters."""
        ranks, lengths = self.ranks, [piece.length(self.ranks) for piece in self.pieces]
        flats = [_cast(shard.reshape(-1), self.gathered) for shard in held]
        table = all_gather(flats[0] if len(flats) == 1 else torch.cat(flats), ranks, self.group).view(ranks, -1)
        return tuple(
            table[:, end - length : end].reshape(ranks * piece.rows(ranks), *piece.shape[1:])[: piece.shape[0]]
            for piece, length, end in zip(self.pieces, lengths, accumulate(lengths), strict=True)
        )

    def returned(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return this rank's parts of the mean gradients; None for a parameter without one."""
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
    """Whole parameters, whose gradients are averaged together."""

    def shown(self, held: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the parameters."""
        return tuple(parameter.view_as(parameter) for parameter in held)

    def returned(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the means of the gradients over all ranks; None for a parameter without one."""
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
    """Cut the parameters of a module for the ranks of a group: each block is a unit, and so are all other parameters.

    The module then holds shards [rows, ...] under the names of the parameters. Raises UsageError for a parameter that
    is one number.
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
    """Average the gradients of a module over the ranks of a group: of each block together, and of the rest.

    Modules use parameters as ``wrappers`` return them.
    """
    for part, named in units(module, blocks):
        pieces = (_sharded(parameter, owners) for parameter, owners in named.items())
        wrapped = [replace(piece, wrap=(wrappers or {}).get(each)) for piece, each in zip(pieces, named, strict=True)]
        hook_unit(part, Replica(tuple(wrapped), ranks, group))


def hook_unit(part: nn.Module, unit: Unit, *, first: bool = False) -> None:
    """Show a unit's parameters while that module runs; ``first``: to the hooks that it already has, too."""
    part.register_forward_pre_hook(unit.enter, prepend=first)
    part.register_forward_hook(unit.leave)


def _sharded(parameter: nn.Parameter, owners: Sequence[tuple[str, str]]) -> ShardedParameter:
    return ShardedParameter(tuple(owners), tuple(parameter.shape), parameter.requires_grad)


Owners: TypeAlias = "dict[nn.Parameter, list[tuple[str, str]]]"
Wrappers: TypeAlias = "dict[nn.Parameter, Callable[[Tensor], Tensor]]"
"""Parameter that a rank holds -> function that makes the tensor that modules use."""


def units(module: nn.Module, blocks: Sequence[str]) -> list[tuple[nn.Module, Owners]]:
    """Return the blocks of a module and the module itself, each with its own parameters and their holders."""
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
    """Yield modules by path, in the order in which fully_shard puts their parameters side by side."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module
