"""Workloads made ready for an engine other than the planned step: ONNX Runtime, ranks."""

from __future__ import annotations

from torch import nn

from magis.capture.workload import Workload
from magis.errors import UsageError

_DROPOUT = ("p", "dropout", "dropout_p", "attention_dropout")
"""Attributes of modules that hold a probability of dropout."""


def check_update(work: Workload, strategy: str) -> None:
    """Raise UsageError for an optimizer that a strategy of ranks or of ONNX Runtime cannot run."""
    own = work.optimizer.own
    if own is not None:
        what = f"{strategy} updates by SGD, Adam or AdamW; the optimizer of {work.name} is {own.name}"
        raise UsageError(what, hint="choose one of these, or leave the strategy out")


def has_dropout(module: nn.Module) -> bool:
    """Return True if any part draws random numbers: with another generator it would not compute the same."""
    return any(
        isinstance(value := vars(part).get(name), float) and value > 0 for part in module.modules() for name in _DROPOUT
    )


def without_dropout(module: nn.Module) -> nn.Module:
    """Set every probability of dropout to 0, also inside attention: ranks then compute what one does."""
    for part in module.modules():
        for name in _DROPOUT:
            if isinstance(vars(part).get(name), float):
                setattr(part, name, 0.0)
    return module
