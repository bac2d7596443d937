"""What the schema of an operator says of it, and which random ones draw as many numbers whatever they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

__all__ = [
    "COMPARISONS", "FREE_DRAWS", "ITEM", "OVERWRITING", "READS", "Looks", "looks_of",
    "written_by",
]  # fmt: skip

COMPARISONS = {getattr(torch.ops.aten, name).Scalar: name for name in ("lt", "le", "gt", "ge")}
ITEM = torch.ops.aten._local_scalar_dense.default
READS = frozenset({ITEM, torch.ops.aten.equal.default})
"""Operators that hand Python a number."""
OVERWRITING = frozenset({"aten::fill_", "aten::zero_", "aten::copy_"})
FREE_DRAWS = frozenset(
    {
        "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli_", "uniform_",
        "normal_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_", "native_dropout",
    }
)  # fmt: skip
"""Random operators that draw as many numbers whatever their arguments hold."""


@dataclass(frozen=True, slots=True)
class Looks:
    """How an operator treats its arguments."""

    view: bool
    """Returns windows on its arguments, and writes nothing."""
    renews: bool
    """Changes how an argument looks at its memory."""
    random: bool
    undefined: bool
    """Returns memory with whatever is in it."""


@cache
def looks_of(func: Any) -> Looks:
    """By the schema of an operator of torch."""
    schema = func._schema
    aliases = [result.alias_info for result in schema.returns]
    name = schema.name.removeprefix("aten::")
    return Looks(
        view=bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases),
        renews=torch.Tag.inplace_view in func.tags or name == "set_",
        random=torch.Tag.nondeterministic_seeded in func.tags or "Generator?" in str(schema),
        undefined=name.startswith(("empty", "new_empty")),
    )


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that a call writes to."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found.extend(item for item in tree_iter(given) if isinstance(item, Tensor))
    return found
