"""The four arguments of a training step, in one order for all functions: module, batch, loss, optimizer.

Instead of a module, callers may pass a tuple of the four, or a function without arguments that returns one (a factory).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture.refusals import in_place_of
from magis.capture.workload import Workload, own_loss
from magis.errors import UsageError
from magis.models.model_specs import from_function, is_factory
from magis.ops.optimizers import OptimizerSpec
from magis.printable import warn

__all__ = ["ORDER", "StepParts", "in_one_order", "live_parts", "recipe_of"]

ORDER = ("module", "batch", "loss", "optimizer")
_ITS_OWN = "leave these out, or give a torch.nn.Module"
_TUPLE = "(module, batch), (module, batch, loss) or (module, inputs, targets, loss); an optimizer may follow"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class StepParts:
    """A module to train in-place, its batch, its loss (None: the module returns it), and its optimizer."""

    module: Any
    batch: Any
    loss: Any
    optimizer: Any


def live_parts(caller: str, module: Any, batch: Any, loss: Any, optimizer: Any) -> StepParts:
    """Return the four parts of a step that trains a module in-place; a factory is called once.

    Raises UsageError, prefixed by `caller`, for missing or duplicate parts.
    """
    made = module
    if callable(module) and not isinstance(module, (nn.Module, type)):
        if batch is not None or loss is not None:
            raise UsageError(f"{caller}: a {type(module).__name__} brings its own batch and loss", hint=_ITS_OWN)
        made = module()
    if isinstance(made, Workload):
        # an OptimizerSpec updates a copy of the weights: to train in-place, the caller passes an optimizer
        made = (made.module, (made.inputs, made.targets), None if made.loss_fn is own_loss else made.loss_fn)
    if not isinstance(made, tuple):
        if batch is None:
            raise UsageError(f"{caller}: a module needs a batch", hint="pass (inputs, targets), or its keywords")
        return StepParts(made, batch, loss, optimizer)
    if batch is not None or loss is not None:
        raise UsageError(f"{caller}: a {type(module).__name__} brings its own batch and loss", hint=_ITS_OWN)
    if made and isinstance(made[-1], Optimizer):
        if optimizer is not None:
            raise UsageError(f"{caller}: two optimizers are given", hint="leave out one of them")
        *made, optimizer = made
    if len(made) not in (2, 3, 4):
        raise UsageError(f"{caller}: a tuple of {len(made)} parts", hint=f"give {_TUPLE}")
    if len(made) == 4:
        return StepParts(made[0], (made[1], made[2]), made[3], optimizer)
    return StepParts(made[0], made[1], made[2] if len(made) == 3 else None, optimizer)


def recipe_of(
    caller: str, module: Any, batch: Any = None, loss: Any = None, optimizer: Any = None, *, name: str = ""
) -> tuple[str, Callable[[int], Workload] | None]:
    """Return the name of a network and a factory (seed -> Workload).

    The name defaults to the class's name. The module may be a name ("bert", "package.module:factory"; the factory is
    then None), a Workload, or anything that `live_parts` accepts; a factory is first called on fake tensors. Raises
    UsageError, prefixed by `caller`, for anything else.
    """
    for what, given in (("module", module), ("loss", loss)):
        if isinstance(given, type):
            raise UsageError(f"{caller}: the {what} is the class {given.__name__}", hint=in_place_of(given, "module"))
    if isinstance(module, nn.Module):
        if batch is None:
            raise UsageError(f"{caller}: a module needs a batch", hint="pass (inputs, targets), or its keywords")
        made = (module, batch) if loss is None else (module, batch, loss)
        name = name or type(module).__name__
        return name, from_function(name, lambda: made, optimizer)
    if not (isinstance(module, (str, Workload, tuple)) or callable(module)):
        what = f"{caller}: a {type(module).__name__} is no module"
        raise UsageError(what, hint="pass a module, a tuple, or a function that returns one")
    if batch is not None or loss is not None:
        raise UsageError(f"{caller}: a {type(module).__name__} brings its own batch and loss", hint=_ITS_OWN)
    if isinstance(module, str):
        if optimizer is not None and not is_factory(module):
            raise UsageError(f"{caller}: a model by name brings its own optimizer", hint="leave it out")
        return module, None
    if not name:
        first = type(module[0]) if isinstance(module, tuple) and module else module
        name = module.name if isinstance(module, Workload) else getattr(first, "__name__", "model")
    return name, from_function(name, module if callable(module) else lambda: module, optimizer)


def in_one_order(
    caller: str, old: Sequence[str], renamed: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that also accepts arguments in the `old` order or by old names, with a DeprecationWarning."""
    at, names = old.index("batch"), renamed or {}

    def is_old(given: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
        if len(given) < 2 or _is_batch(given[1]):
            return False
        by_name = "batch" in keywords or any(names.get(each) == "batch" for each in keywords)
        first = isinstance(given[1], (Optimizer, OptimizerSpec, str)) if old[1] == "optimizer" else callable(given[1])
        return by_name or first or (len(given) > at and _is_batch(given[at]))

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*given: P.args, **keywords: P.kwargs) -> R:
            order: Sequence[str] = old if is_old(given, keywords) else ORDER
            if order is not ORDER or not names.keys().isdisjoint(keywords):
                text = f"{caller}: the order is {', '.join(ORDER)} now, under these names"
                warn(text, DeprecationWarning, stacklevel=2)
            if len(given) > len(ORDER):
                return function(*given, **keywords)  # Python raises
            named: Any = dict(zip(order, given, strict=False))
            again = {names.get(name, name): value for name, value in keywords.items()}
            if twice := named.keys() & again.keys():
                raise TypeError(f"{function.__name__}() got multiple values for argument {min(twice)!r}")
            return function(**(named | again))  # type: ignore[call-arg]

        return call

    return decorated


def _is_batch(given: Any) -> bool:
    if isinstance(given, (Tensor, Mapping)):
        return True
    return not (given is None or callable(given) or isinstance(given, (str, Optimizer, OptimizerSpec)))
