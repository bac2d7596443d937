"""Calls as people write them, for properties that draw their arguments.

`mm.default(f[4,6], f[6,8])` is a call: `f[4,6]` is a float64 tensor, `i[...]` int64, `b[...]` bool, `c[...]`
complex128, `u[...]` uint8, row by row unless strides follow in braces; `~conj` or `~neg` behind it are bits that are
set.
"""

from __future__ import annotations

import re
from dataclasses import replace

from magis.cost.signature import parse
from magis.graph import Op, Value
from magis.ops.fake_results import bits_of
from tests.ops.cutting import Case, draw, run

_TENSOR = re.compile(r"\b([fibcu])\[([\d,]*)\](\{[\d,]*\})?")
_TYPES = {"f": "float64", "i": "int64", "b": "bool", "u": "uint8", "c": "complex128"}


def call_of(line: str) -> tuple[Op, dict[int, Value]]:
    """The call that a line describes, without outputs."""
    return parse("aten." + _TENSOR.sub(_written_out, line))


def _written_out(found: re.Match[str]) -> str:
    kind, shape, strides = found.groups()
    sizes = [int(size) for size in shape.split(",") if size]
    steps = [1] * len(sizes)
    for place in range(len(sizes) - 2, -1, -1):
        steps[place] = steps[place + 1] * sizes[place + 1]
    return f"{_TYPES[kind]}[{shape}]" + (strides or "{" + ",".join(map(str, steps)) + "}")


def case_of(line: str) -> Case:
    """The call of a line with its outputs, as a run of it shows them."""
    op, values = call_of(line)
    tensors = draw(Case(op, values))
    owners = {tensor.untyped_storage().data_ptr(): number for tensor, number in zip(tensors, op.inputs(), strict=True)}
    numbers: list[int | None] = []
    for result in run(op, tensors):
        if result is None:
            numbers.append(None)
            continue
        number = len(values)
        owner = owners.get(result.untyped_storage().data_ptr()) if result.numel() else None
        values[number] = Value(
            number,
            tuple(result.shape),
            tuple(result.stride()),
            str(result.dtype).removeprefix("torch."),
            number if owner is None else values[owner].storage,
            int(result.storage_offset()),
            bits=bits_of(result),
        )
        numbers.append(number)
    return Case(replace(op, outputs=tuple(numbers)), values)
