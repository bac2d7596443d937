"""Forms of a graph in which its operators' costs are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from magis.cost.signature import signature
from magis.ir import Graph, Op, Value, every_op
from magis.simulate.compile import redo_form


def redo_graph(graph: Graph) -> Graph:
    """A graph that holds every operator in the form in which it is recomputed; only good for asking for costs."""
    return replace(graph, ops=tuple(_redone(op, graph) for op in graph.ops))


def _redone(op: Op, graph: Graph) -> Op:
    form = redo_form(op, graph)
    return form if form.body is None else replace(form, body=replace(form.body, graph=redo_graph(form.body.graph)))


def signatures(graph: Graph) -> dict[str, tuple[Op, Mapping[int, Value]]]:
    """Every distinct operator signature of a graph with an example; swaps left out."""
    return {signature(op, values): (op, values) for op, values in every_op(graph) if not op.target.startswith("magis.")}
