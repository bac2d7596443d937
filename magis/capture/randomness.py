"""Which calls draw random numbers, and from which generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from magis.aten.generators import same_generator
from magis.errors import CaptureError

__all__ = ["Own", "draws"]


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers: by the operator's tag, and by its probability of dropout if it has one."""
    arguments = func._schema.arguments
    tagged = torch.Tag.nondeterministic_seeded in func.tags
    if not tagged and not any("Generator" in str(argument.type) for argument in arguments):
        return False
    name = func._schema.name
    if name.endswith("_backward"):  # repeats what its forward drew
        return False
    for position, argument in enumerate(arguments):
        if argument.name in ("dropout_p", "dropout") and "float" in str(argument.type):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given != 0.0)
    return True


class Own:
    """The generators that a step holds itself or makes, by name; more may be made after this."""

    def __init__(self, held: Mapping[str, torch.Generator]) -> None:
        self._held = held
        self._default = torch.default_generator

    def name_of(self, generator: torch.Generator, module: str) -> str:
        """Name of a generator from which ``module`` draws; empty for the default one. CaptureError if none holds it."""
        if any(same_generator(generator, each) for each in (self._default, torch.default_generator)):
            return ""
        for name, own in self._held.items():
            if same_generator(generator, own):
                return name
        raise CaptureError(
            f"module {module or '(root)'!r} draws from a generator that was not there before the step",
            hint="make it with torch.Generator, or keep it as an attribute of the module",
        )
