"""Every distinct operator that the plans of a model can hold, as signatures: what a profile must know."""

from __future__ import annotations

from collections.abc import Iterator

from magis.cost.operator_latency import signatures_of
from magis.cost.signature import signature
from magis.errors import VerifyError
from magis.fission.candidates import most_parts
from magis.fission.expand import expand
from magis.fission.loss_suffix import pieces
from magis.fission.region import Region
from magis.graph import Graph
from magis.planner.subject import Subject
from magis.planner.traced_model import redo_graph
from magis.search.fission_pareto import numbers_of_parts
from magis.simulate.compiled_problem import reusable, take_over_form
from magis.strategies.single_device import local


def signatures_of_model(subject: Subject, *, parts: bool = True) -> tuple[str, ...]:
    """The signatures in the order in which they are met: of the step as eager runs it and under checkpointing, of the
    forms that the search works on, and with `parts` at all sizes that fission asks for."""
    steps = [subject.captured]
    if subject.blocks:
        steps.append(subject.captured_as(local("checkpoint", subject.kind))[0])
    graphs = [graph for step in steps for graph in (step.original.graph, step.graph)]
    found = [key for graph in graphs for key in signatures_of(graph)]
    for graph in (subject.normal, subject.aggregated):
        found += _planned(graph)
    for graph in _loops(subject.aggregated) if parts else ():
        found += _planned(graph)
    return tuple(dict.fromkeys(found))


def _planned(graph: Graph) -> Iterator[str]:
    """As they stand, as they are recomputed, and as they take over the memory of an input."""
    for form in (graph, redo_graph(graph)):
        yield from signatures_of(form)
        for level in _levels(form):
            for op in level.ops:
                for victim in reusable(level, op):
                    yield signature(take_over_form(op, victim), level.values)


def _levels(graph: Graph) -> Iterator[Graph]:
    """The graph and the bodies of its loops."""
    yield graph
    for op in graph.ops:
        if op.body is not None:
            yield from _levels(op.body.graph)


def _loops(graph: Graph) -> Iterator[Graph]:
    """The graph with each piece that may run in parts as a loop, in all numbers of parts."""
    for piece in pieces(graph):
        for parts in numbers_of_parts(most_parts(piece.cuts)):
            try:
                yield expand(graph, Region(piece.cuts, parts), in_place=True)
            except VerifyError:  # no legal region, or a kernel refuses the size of a part: no plan has it
                break
