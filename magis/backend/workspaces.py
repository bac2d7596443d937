"""Workspaces: the scratch bytes that each operator allocates, by signature.

Each distinct signature is called on made-up arguments of the same shapes, strides and types, under one
profile of the CPU allocator for all of them. Workspaces depend on the instruction set, on the number of
threads and on the torch version (the device identity), and mostly not on the numbers in the tensors.

The made-up numbers only have to be harmless: floats in [0.5, 1) (valid variances and probabilities), whole
numbers 0 (valid indices), scalars 1. One call before the measured one lets kernels fill their caches, which
are no scratch. Where that is not enough (`magis.backend.contents`), a whole step is run on its own tensors
(`record_workspaces`), else a process of its own tries made-up ones (`magis.backend.aside`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from magis.backend.aside import measured_aside
from magis.backend.contents import Needs, needs
from magis.backend.isolated import measure_here
from magis.backend.made_up import reach
from magis.cost.signature import signature
from magis.ir.types import ITEM_SIZE, Op, Value

__all__ = ["measure_workspaces"]


def measure_workspaces(
    items: Iterable[tuple[Op, Mapping[int, Value]]], limit_bytes: int | None = None
) -> dict[str, int]:
    """Bytes that each operator allocates at its worst moment beyond its fresh outputs, by signature; on the
    CPU.

    Left out of the answer: operators that refuse made-up arguments (they raise) or that must not be given any, those
    whose process ended over them, and, with `limit_bytes`, those whose arguments and outputs alone are larger than
    that. The result repeats exactly.
    """
    here: list[tuple[Op, Mapping[int, Value]]] = []
    aside: dict[str, None] = {}
    for op, values in items:
        wanted = needs(op, values)
        if wanted is Needs.BYTES or (limit_bytes is not None and _bytes(op, values) > limit_bytes):
            continue
        if wanted is Needs.ANYTHING:
            here.append((op, values))
        else:
            aside[signature(op, values)] = None
    return {**measure_here(here), **measured_aside(tuple(aside))}


def _bytes(op: Op, values: Mapping[int, Value]) -> int:
    touched = dict.fromkeys((*op.inputs(), *op.made()))
    return sum(reach(values[number]) * ITEM_SIZE[values[number].dtype] for number in touched)
