"""Head and loss in chunks of rows, each checkpointed, around the user's own forward and loss.

Within `deferred_scores`, a linear layer outside of the blocks whose weight has more rows than columns returns scores
that are not computed yet. `F.cross_entropy` computes them and the loss chunk by chunk. Reshapes, slices of rows and
casts are put off with them; any other function gets all scores, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from magis.errors import UsageError

CHUNKS = 8
"""Number of chunks of a loss."""

_tensor: Any = Tensor
_LOOKS = {
    *(getattr(_tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    *(getattr(_tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__", "register_hook")),
}
"""Functions that need no scores to answer."""
_VIEWS = {_tensor.view, _tensor.__getitem__}
_SHAPES = {_tensor.view, _tensor.reshape, _tensor.flatten, torch.reshape, torch.flatten, _tensor.contiguous}


_IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "pow"))
"""Operators that write their left side."""

Layer: TypeAlias = Callable[[Tensor], Tensor]
Casting: TypeAlias = Callable[[], AbstractContextManager[Any]]


class DeferredScores(Tensor):
    """Scores of a linear layer for rows `x`, computed when a function other than `F.cross_entropy` reads them."""

    x: Tensor
    layer: Layer
    """Function that computes the scores of rows."""
    source: DeferredScores | None
    """Scores from which these are made, by `made`; None for those of the layer itself."""
    made: Layer | None
    known: Tensor | None
    """Scores, once they are computed."""
    copied: bool
    """True if a copy was made of these, which a write in place leaves as it is."""

    @staticmethod
    def of(
        x: Tensor,
        layer: Layer,
        columns: int,
        dtype: torch.dtype,
        source: DeferredScores | None = None,
        made: Layer | None = None,
    ) -> DeferredScores:
        """Return the scores of a layer with so many outputs."""
        shape = (*x.shape[:-1], columns)
        self: DeferredScores = _tensor._make_wrapper_subclass(
            DeferredScores, shape, dtype=dtype, device=x.device, requires_grad=True
        )
        self.x, self.layer, self.source, self.made, self.known = x, layer, source, made, None
        self.copied = False
        self.register_hook(_refused)  # type: ignore[no-untyped-call]
        return self

    def is_pending(self) -> bool:
        """Return True if nothing has read the scores, or those from which they were made."""
        return self.known is None and (self.source is None or self.source.is_pending())

    def has_copies(self) -> bool:
        """Return True if a copy was made of these scores, or of those of which they are a view."""
        return self.copied or (self.source is not None and self.is_view() and self.source.has_copies())

    def is_view(self) -> bool:
        """Return True if these share the memory of those from which they are made."""
        return isinstance(self.made, partial) and self.made.args[0] in _VIEWS

    def whole(self) -> Tensor:
        """Return the scores, computed once."""
        if self.known is None:
            with torch.enable_grad():
                if self.source is None or self.made is None:
                    self.known = self.layer(self.x)
                else:
                    self.known = self.made(self.source.whole())
        return self.known

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = None
        if _overwrites(func) and isinstance(args[0], DeferredScores) and args[0].has_copies():
            raise UsageError("a loss in chunks: scores are written in place after a copy of them was taken")
        if func is F.cross_entropy:
            found = _cross_entropy(*args, **kwargs)
        elif isinstance(args[0] if args else None, DeferredScores) and args[0].is_pending():
            found = _kept_pending(args[0], func, args[1:], kwargs)
        if found is not None:
            return found
        args, kwargs = tree_map_only(DeferredScores, DeferredScores.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        return _refused(func)


def _refused(_given: object) -> None:
    """Raise UsageError for code that no torch function leads to, such as `torch.autograd.Function`."""
    raise UsageError("a loss in chunks: scores go to an autograd function of the user's own, not to F.cross_entropy")


def _overwrites(func: Any) -> bool:
    """Return True for a function that writes its first argument in place."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _note_copy(scores: DeferredScores) -> None:
    """Note that a copy was made of scores, and of those of which they are a view."""
    scores.copied = True
    if scores.source is not None and scores.is_view():
        _note_copy(scores.source)


def _kept_pending(
    scores: DeferredScores, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> DeferredScores | None:
    """Return the result of a cast, a reshape or a slice of rows, not computed either; None for other functions, and
    where the last dimension changes."""
    x, layer, dtype, made = scores.x, scores.layer, scores.dtype, partial(_call, func, args, kwargs)
    columns = scores.shape[-1]
    if func is _tensor.float or (func is _tensor.to and len(args) == 1 and isinstance(args[0], torch.dtype)):
        wanted = args[0] if args else torch.float32
        if dtype == wanted:
            return scores
        _note_copy(scores)
        return DeferredScores.of(x, partial(_cast, layer, wanted), columns, wanted, scores, made)
    if func is _tensor.__getitem__:
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        if not all(each is None or each is ... or isinstance(each, (int, slice)) for each in index):
            return None
    elif func not in _SHAPES:
        return None
    with _disable_current_modes(), torch.no_grad():
        shape = made(torch.empty(scores.shape, device="meta")).shape
    if not shape or shape[-1] != columns or columns == x.shape[-1]:
        return None
    rows = x[args[0]] if func is _tensor.__getitem__ else x.reshape(*shape[:-1], x.shape[-1])
    if rows.shape != (*shape[:-1], x.shape[-1]):
        return None
    if func not in _VIEWS:
        _note_copy(scores)
    return DeferredScores.of(rows, layer, columns, dtype, scores, made)


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any], scores: Tensor) -> Tensor:
    return func(scores, *args, **kwargs)  # type: ignore[no-any-return]


def _cast(layer: Layer, dtype: torch.dtype, x: Tensor) -> Tensor:
    return layer(x).to(dtype)


def _cross_entropy(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return `F.cross_entropy` of pending scores in chunks; None for scores that are known, and for weighted classes,
    probabilities as targets and old options."""
    if (
        not isinstance(input, DeferredScores)
        or not input.is_pending()
        or input.dim() != 2
        or target.is_floating_point()
    ):
        return None
    if weight is not None or size_average is not None or reduce is not None:
        return None
    layer, summed = input.layer, "none" if reduction == "none" else "sum"

    def part(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            layer(x), labels, ignore_index=ignore_index, reduction=summed, label_smoothing=label_smoothing
        )

    pairs = zip(input.x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
    parts = [checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    if reduction == "none":
        return torch.cat(parts)
    total = torch.stack(parts).sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class _Deferring(TorchFunctionMode):
    """Function mode in which linear layers with certain weights, by `id`, return deferred scores."""

    def __init__(self, weights: frozenset[int]) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        if id(weight) not in self._weights or isinstance(input, DeferredScores):
            return F.linear(input, weight, bias)
        kind = input.device.type
        casts, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        casting = partial(torch.autocast, kind, dtype=dtype, enabled=casts)
        layer = partial(_scores, weight, bias, casting)
        return DeferredScores.of(input, layer, weight.shape[0], dtype if casts else input.dtype)


def _scores(weight: Tensor, bias: Tensor | None, casting: Casting, x: Tensor) -> Tensor:
    with casting():
        return F.linear(x, weight, bias)


@contextmanager
def deferred_scores(module: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Within the context, let linear layers outside of the blocks return deferred scores in the module's forward."""
    inside = {id(each) for path in blocks for each in module.get_submodule(path).parameters()}
    weights = frozenset(
        id(each) for each in module.parameters() if each.dim() == 2 and each.shape[0] > each.shape[1]
    ) - inside  # fmt: skip
    forward = module.forward

    def deferring(*args: Any, **kwargs: Any) -> Any:
        with _Deferring(weights):
            return forward(*args, **kwargs)

    module.forward = deferring  # an instance attribute, as of checkpointed blocks
    try:
        yield
    finally:
        del module.forward
