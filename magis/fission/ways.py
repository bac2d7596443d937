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
    """A call that is hashed and compared by ``looks``."""

    looks: tuple[object, ...]
    op: Op = field(compare=False)
    values: Mapping[int, Value] = field(compare=False)


def ways(op: Op, values: Mapping[int, Value]) -> tuple[Split, ...]:
    """Return ``splits`` of the call, from the cache if a call that looks alike was seen."""
    own = {number: values[number] for number in (*op.inputs(), *op.made())}
    storages = {storage: number for number, storage in enumerate(dict.fromkeys(v.storage for v in own.values()))}
    lies = tuple((storages[own[number].storage], own[number].offset) for number in op.inputs())
    results = [None if number is None else own[number] for number in op.outputs]
    made = tuple(None if v is None else (v.dtype, v.shape, v.stride, v.offset, storages[v.storage]) for v in results)
    return _cached_splits(_Call((signature(op, own), op.random, lies, made), op, own))


@functools.lru_cache(maxsize=8192)
def _cached_splits(call: _Call) -> tuple[Split, ...]:
    return splits(call.op, call.values)
