"""Parameters in one flat buffer, of which every rank owns an equal, contiguous part (Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from magis.strategies.distributed import of_kind, quiet

Piece = tuple[str, int, int, int]
"""A parameter's name, where its piece starts in the parameter and in the rank's part, and how many elements it has."""


class Flat:
    """Parameters as views of one buffer, padded to a multiple of the ranks; each rank owns one part of it.

    ``dtype`` is the type of weights and gradients; where it is not the parameters' own, ``master`` is this rank's part
    in float32, else the part itself. ``sharded``: the part is a tensor of its own, and the whole buffer only has memory
    between `gather` and `release`. Tensors that autograd saved are views of the buffer, and see it come back.
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
        """Where a parameter starts in the whole buffer."""
        return next(start for each, start in self._starts() if each is parameter)

    def pieces(self) -> Iterator[Piece]:
        """What of this rank's part belongs to which parameter."""
        for (name, parameter), (_, start) in zip(self.named.items(), self._starts(), strict=True):
            low = max(start, self._first)
            high = min(start + parameter.numel(), self._first + self.length)
            if low < high:
                yield name, low - start, low - self._first, high - low

    def gather(self) -> None:
        """Make the whole buffer there, from every rank's part; nothing where it is."""
        if self.sharded and not self._held:
            self.whole.untyped_storage().resize_(self._nbytes)
            self._collect()
            self._held = True

    def release(self) -> None:
        """Give the memory of the whole buffer back."""
        if self.sharded and self._held:
            self.whole.untyped_storage().resize_(0)
            self._held = False

    def updated(self) -> None:
        """After the update of this rank's part: into the lower type, and to all ranks that hold the whole."""
        with torch.no_grad():
            if self.master is not self.own:
                self.own.copy_(self.master)
        if not self.sharded:
            self._collect()

    def _collect(self) -> None:
        # a tensor of its own version: autograd must not take this for a write to what it saved
        with quiet(), torch.no_grad():
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(self.whole.data, self.own)

    def reduce(self, grads: Mapping[str, Tensor | None]) -> Tensor:
        """This rank's part of the mean gradient over the ranks; missing gradients count as zeros."""
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
