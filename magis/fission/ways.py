"""The ways to cut a call (``magis.ops.splits``), worked out once for all calls that look alike, as equal layers do."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from magis.cost.signature import signature
from magis.graph import Op, Value
from magis.ops.splits import Split, splits


@dataclass(frozen=True)
class _Call:
    """A call, known by its looks."""

    looks: tuple[object, ...]
    op: Op = field(compare=False)
    values: Mapping[int, Value] = field(compare=False)


def ways(op: Op, values: Mapping[int, Value]) -> tuple[Split, ...]:
    """``splits`` of the call."""
    own = {number: values[number] for number in (*op.inputs(), *op.made())}
    storages = {storage: number for number, storage in enumerate(dict.fromkeys(v.storage for v in own.values()))}
    lies = tuple((storages[own[number].storage], own[number].offset) for number in op.inputs())
    made = tuple(
        None if number is None else (_looks(own[number]), storages[own[number].storage]) for number in op.outputs
    )
    return _ways(_Call((signature(op, own), op.random, lies, made), op, own))


def _looks(value: Value) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride, value.offset


@functools.lru_cache(maxsize=8192)
def _ways(call: _Call) -> tuple[Split, ...]:
    return splits(call.op, call.values)
