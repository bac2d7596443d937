"""Embedding, output projection and cross-entropy under tensor parallelism, sharded along the vocabulary.

Sharded by torch's own styles, as in torchtitan:

    embedding            `RowwiseParallel`: zeros for the tokens of other ranks, then one all-reduce
    last hidden state    whole on every rank; its gradient is all-reduced
    output projection    the logits of this rank's tokens; the weight is the embedding's own
    cross-entropy        `loss_parallel`: three small all-reduces, of the largest logit, the sum of exponentials and the
                         target's logit

No rank holds all logits, unless the loss is another function, which gets them whole. If the ranks do not divide the
vocabulary, the last shard is smaller, as in torch's DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from magis.errors import UsageError
from magis.extensions.ranks.strategies.distributed import quiet


@dataclass(frozen=True)
class LossOfParts:
    """Loss function that accepts sharded logits."""

    loss_fn: Callable[..., Tensor]

    def __call__(self, output: Any, *targets: Tensor) -> Tensor:
        with _Parts(), quiet():
            loss: Tensor = _full_tensors(self.loss_fn(output, *targets))
        return loss


_KEEPING_PARTS = frozenset(
    {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "__len__"}
    | {"flatten", "view", "reshape", "contiguous", "__getitem__", "detach"}
    | {"to", "type", "float", "half", "bfloat16", "double"}
)
"""Names of functions whose results are sharded like their input."""


class _Parts(TorchFunctionMode):
    """Mode that computes the cross-entropy of sharded logits, and passes whole logits to all other functions."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func is functional.cross_entropy:
            found = _in_parts(**signature(func).bind(*args, **kwargs).arguments)
            if found is not None:
                return found
        name = func.__name__
        changes = name == "__setitem__" or name.strip("_") + "_" == name
        if changes and args and isinstance(args[0], DTensor):
            what = f"the loss changes the logits in place ({name}), of which a rank has a part"
            raise UsageError(what, hint="change a copy of them")
        indices = [item for index in args[1:] for item in (index if isinstance(index, tuple) else (index,))]
        if name in _KEEPING_PARTS and not any(isinstance(item, (Tensor, list)) for item in indices):
            with suppress(RuntimeError):  # of what torch does not cut: a view that splits the vocabulary, say
                return func(*args, **kwargs)
        return func(*_full_tensors(args), **_full_tensors(kwargs))


def _full_tensors(tree: Any) -> Any:
    return tree_map_only(DTensor, DTensor.full_tensor, tree)


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
"""Reduction by name -> the integer that ATen operators take."""


def _in_parts(
    input: Tensor,  # noqa: A002  (as torch calls it)
    target: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    **others: object,
) -> Tensor | None:
    """Return the cross-entropy of logits [tokens, vocabulary] sharded along the vocabulary; None if unsupported."""
    asked = any(isinstance(other, (Tensor, bool)) or other not in (None, 0.0) for other in others.values())
    if asked or not isinstance(input, DTensor) or isinstance(target, DTensor):
        return None
    if input.dim() != 2 or tuple(input.placements) != (Shard(1),) or target.is_floating_point():
        return None
    if torch.is_autocast_enabled(input.device.type):
        input = input.float()  # noqa: A001
    found: Tensor = _CrossEntropy.apply(input, target, _REDUCTIONS[reduction], ignore_index)  # type: ignore[no-untyped-call]
    return found


class _CrossEntropy(torch.autograd.Function):
    """Autograd function of cross-entropy with forward and backward under `loss_parallel`."""

    @staticmethod
    def forward(ctx: Any, logits: DTensor, target: Tensor, reduction: int, ignored: int) -> Tensor:
        aten = torch.ops.aten
        with loss_parallel():
            logarithms = aten._log_softmax.default(logits, 1, False)
            loss, count = aten.nll_loss_forward.default(logarithms, target, None, reduction, ignored)
        ctx.save_for_backward(logarithms, target, count)
        ctx.asked = (reduction, ignored)
        found: Tensor = loss.to_local()
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        aten, (logarithms, target, count) = torch.ops.aten, ctx.saved_tensors
        grad = DTensor.from_local(grads[0], logarithms.device_mesh, [Replicate()], run_check=False)
        with loss_parallel():
            of_logits = aten.nll_loss_backward.default(grad, logarithms, target, None, *ctx.asked, count)
        return of_logits, None, None, None
