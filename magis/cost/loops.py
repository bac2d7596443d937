"""What the operators of loops cost: those of the ATen operators that do the same work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from magis.cost.signature import signature
from magis.ir.loops import JOIN, PART, REDUCE, rows_around
from magis.ir.types import Graph, Op, Ref, Value, every_op

MERGING = (PART, JOIN, REDUCE)


def signatures_of(graph: Graph) -> Iterator[str]:
    """Of every operator that the device runs, bodies of loops included, the signature by which costs know it."""
    for op, values in every_op(graph):
        if op.body is None and (op.target in MERGING or not op.target.startswith("magis.")):
            yield signature(*equivalent(op, values))


def equivalent(op: Op, values: Mapping[int, Value]) -> tuple[Op, Mapping[int, Value]]:
    """The ATen call that moves the same bytes as a stretch taken, joined or reduced; other operators as they are.

    With the values of the call alone: a copy of all of a step's for every stretch would take longer than all the rest.
    """
    if op.target not in MERGING:
        return op, values
    values = {value: values[value] for value in (*op.inputs(), *op.made())}
    match op.target, op.args:
        case "magis.part", (Ref(whole), *_):
            made = values[op.made()[0]]
            window = replace(values[whole], shape=made.shape)
            target = "aten.alias.default" if made.storage == window.storage else "aten.clone.default"
            return replace(op, target=target, args=(Ref(whole),)), {**values, whole: window}
        case "magis.join", (Ref(whole), Ref(part), *_):
            window = replace(values[whole], shape=values[part].shape)
            target = "aten.add_.Tensor" if any(rows_around(op)) else "aten.copy_.default"
            merged = replace(op, target=target, args=(Ref(whole), Ref(part)), outputs=(whole,))
            return merged, {**values, whole: window}
        case "magis.reduce", (Ref(whole), Ref(part), _):
            return replace(op, target="aten.add_.Tensor", args=(Ref(whole), Ref(part)), outputs=(whole,)), values
    return op, values
