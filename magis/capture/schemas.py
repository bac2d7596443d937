"""Operators' schemas: aliases, random numbers, and which tensors a captured step may handle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from magis.errors import CaptureError
from magis.ops.fake_results import bits_of
from magis.ops.generators import same_generator
from magis.ops.operators import op_info

COMPARISONS = {getattr(torch.ops.aten, name).Scalar: name for name in ("lt", "le", "gt", "ge")}
ITEM = torch.ops.aten._local_scalar_dense.default
READS = frozenset({ITEM, torch.ops.aten.equal.default})
"""Operators that return a Python number."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Effects of an operator on its arguments, from its schema."""

    view: bool
    """True if the operator returns views of its arguments, and writes nothing."""
    renews: bool
    """True if the operator changes an argument's metadata in-place."""
    random: bool
    undefined: bool
    """True if the operator returns uninitialized memory."""


@cache
def looks_of(func: Any) -> TensorMeta:
    """Return the effects of an operator, from its schema and tags."""
    schema = func._schema
    aliases = [result.alias_info for result in schema.returns]
    name = schema.name.removeprefix("aten::")
    return TensorMeta(
        view=bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases),
        renews=torch.Tag.inplace_view in func.tags or name == "set_",
        random=torch.Tag.nondeterministic_seeded in func.tags or "Generator?" in str(schema),
        undefined=name.startswith(("empty", "new_empty")),
    )


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], spared: int | None = None) -> list[Tensor]:
    """Return the tensor arguments that a call writes, by its schema, except the argument at position `spared`."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and position != spared:
            found += tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


# Tensors that a step may use.

ONLY_DENSE = "only dense, strided tensors can be captured"


def tensors_in(item: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of an operator or a module."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (list, tuple, Mapping)):
        for part in item.values() if isinstance(item, Mapping) else item:
            yield from tensors_in(part)


def check_dense(item: Any) -> None:
    """Raise CaptureError for a tensor among arguments or results that is not dense and strided."""
    for tensor in tensors_in(item):
        problem = layout_problem(tensor)
        if problem:
            raise CaptureError(f"the step handles a tensor that is {problem}", hint=ONLY_DENSE)


def layout_problem(tensor: Tensor) -> str:
    """Return "nested", "quantized" or the layout of a tensor that is not dense and strided; "" if it is."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "quantized" if tensor.is_quantized else ""


def window(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key of storage, offset, shape, strides and dtype: autograd returns saved tensors as new objects."""
    return (
        tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()),
        tensor.dtype, bits_of(tensor),
    )  # fmt: skip


# Calls that draw random numbers, and their generators.


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call draws random numbers, by its operator's tag and its dropout probability."""
    arguments = func._schema.arguments
    tagged = torch.Tag.nondeterministic_seeded in func.tags
    if not tagged and not any("Generator" in str(argument.type) for argument in arguments):
        return False
    name = func._schema.name
    if name.endswith("_backward"):  # uses the forward's random numbers
        return False
    for position, argument in enumerate(arguments):
        if argument.name in ("dropout_p", "dropout") and "float" in str(argument.type):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given != 0.0)
    return True


class Own:
    """The generators that a step holds or makes, by name; more may be added later."""

    def __init__(self, held: Mapping[str, torch.Generator]) -> None:
        self._held = held
        self._default = torch.default_generator

    def name_of(self, generator: torch.Generator, module: str) -> str:
        """Return the name of a generator from which ``module`` draws; "" for the default one. Raises CaptureError if
        unknown."""
        if any(same_generator(generator, each) for each in (self._default, torch.default_generator)):
            return ""
        for name, own in self._held.items():
            if same_generator(generator, own):
                return name
        raise CaptureError(
            f"module {module or '(root)'!r} draws from a generator that was not there before the step",
            hint="make it with torch.Generator, or keep it as an attribute of the module",
        )


def least_bytes(target: str, position: int, item: Any, largest: int) -> int:
    """Return the least bytes of a result's storage (`OpInfo.least_bytes`)."""
    return op_info(target).least_bytes(position, item, largest) if isinstance(item, Tensor) else 0
