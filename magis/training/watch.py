"""What of a module a plan rests on: it is looked at before every step, since a loop may change it in between."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Watch", "has_hooks"]


_PLAIN = frozenset({bool, int, float, str, type(None)})


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether something else happens to the parameter's gradient, which a step without autograd would not do."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, kind, None) for kind in kinds)


class Watch:
    """A module's parts as they were found. Looking again takes some microseconds a part."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())

    def structure(self) -> tuple[Any, ...]:
        """What another plan is needed for: sub-modules, modes, the parameters' looks, trained or not, and plain
        attributes (a dropout's probability, say), which are constants of a captured step."""
        return tuple(
            (
                *map(id, part.children()),
                *((name, value) for name, value in vars(part).items() if type(value) in _PLAIN),
                *((p.requires_grad, p.dtype, p.shape, p.device, has_hooks(p)) for p in part.parameters(recurse=False)),
            )
            for part in self._parts
        )

    def tensors(self) -> tuple[int, ...]:
        """Which parameters and buffers the module has, for steps that are bound to them."""
        return tuple(
            id(tensor)
            for part in self._parts
            for tensors in (part.parameters(recurse=False), part.buffers(recurse=False))
            for tensor in tensors
        )
