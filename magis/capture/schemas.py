"""What the schemas of torch's operators say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

__all__ = ["Looks", "looks", "written"]


@dataclass(frozen=True, slots=True)
class Looks:
    """What an operator returns."""

    view: bool
    """Returns windows on its arguments, and writes nothing."""
    renews: bool
    """Changes how an argument looks at its memory."""
    random: bool
    undefined: bool
    """Returns memory with whatever is in it."""


@cache
def looks(func: Any) -> Looks:
    """What an operator returns, by its schema and tags."""
    schema = func._schema
    aliases = [result.alias_info for result in schema.returns]
    name = schema.name.removeprefix("aten::")
    return Looks(
        view=bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases),
        renews=torch.Tag.inplace_view in func.tags or name == "set_",
        random=torch.Tag.nondeterministic_seeded in func.tags or "Generator?" in str(schema),
        undefined=name.startswith(("empty", "new_empty")),
    )


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call that it writes to."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found.extend(item for item in tree_iter(given) if isinstance(item, Tensor))
    return found
