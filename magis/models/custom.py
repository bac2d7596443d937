"""A user's own network: what their factory returned, checked and turned into a Workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from magis.errors import UsageError
from magis.models.workload import OptimizerSpec, Workload

__all__ = ["as_workload"]

_EXPECTED = "return a magis.models.workload.Workload or (module, inputs, targets, loss_fn)"


def as_workload(path: str, made: object) -> Workload:
    """The Workload named `path` in `made`: one already, or a tuple (module, inputs, targets, loss function).

    `inputs` and `targets` may each be one tensor or a sequence of them. Raises UsageError for anything else.
    """
    if isinstance(made, Workload):
        return replace(made, name=path)
    if not isinstance(made, tuple) or len(made) != 4:
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise UsageError(f"{path}: the factory returned {what}", hint=_EXPECTED)
    module, inputs, targets, loss_fn = made
    if not isinstance(module, nn.Module):
        raise UsageError(f"{path}: the module is a {type(module).__name__}, not an nn.Module", hint=_EXPECTED)
    if not callable(loss_fn):
        raise UsageError(f"{path}: the loss function is a {type(loss_fn).__name__}, not callable", hint=_EXPECTED)
    return Workload(
        name=path,
        module=module.train(),
        inputs=_tensors(path, "inputs", inputs),
        targets=_tensors(path, "targets", targets),
        loss_fn=loss_fn,
        optimizer=OptimizerSpec("sgd", lr=1e-3),
    )


def _tensors(path: str, role: str, given: object) -> tuple[Tensor, ...]:
    items: Sequence[object] = given if isinstance(given, (tuple, list)) else (given,)
    wrong = [type(item).__name__ for item in items if not isinstance(item, Tensor)]
    if wrong:
        raise UsageError(f"{path}: {role} hold a {wrong[0]}, not only tensors", hint=_EXPECTED)
    return tuple(item for item in items if isinstance(item, Tensor))
