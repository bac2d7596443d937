"""A small step by hand, regions of it that are cut along rows, and what a loop in place is held to."""

from __future__ import annotations

from magis.fission.expand import expand
from magis.fission.region import Region
from magis.graph import Graph, dump, parse, verify
from magis.graph.loop_rules import taken_over
from magis.ops.splits import splits
from tests.fission.cutout import check_same, loops

SQUARE = "float64 [4, 4] {4, 1} +0"
HEAD = (
    "storage 1 batch 128",
    "storage 2 temporary 128",
    "storage 3 temporary 128",
    "storage 4 temporary 32",
    f"value 1 @1 {SQUARE}",
    f"value 2 @2 {SQUARE}",
    f"value 3 @3 {SQUARE}",
    "value 4 @4 float64 [4] {1} +0",
    "input 1",
)
MADE = "op 0 %2 = aten.exp.default(%1) reads 1:0 phase forward"
PRODUCT = "op 1 %3 = aten.mm.default(%2, %1) reads 1:0 2:0 phase forward"
SUMMED = "op 2 %4 = aten.sum.dim_IntList(%3, [1]) reads 3:0 phase forward"


def step(*lines: str) -> Graph:
    """A sound graph of these lines."""
    graph = parse("\n".join(["magis graph 1", *lines]) + "\n")
    verify(graph)
    return graph


def rows(graph: Graph, *positions: int, parts: int = 2) -> Region:
    """The operators with all that they make cut along the first dimension."""
    cuts = {}
    for at in positions:
        ways = splits(graph.ops[at], graph.values)
        (cuts[at],) = [way for way in ways if set(way.outputs) == {0}]
    return Region(cuts, parts)


def in_place(graph: Graph, region: Region) -> Graph:
    """The step with a loop in place: sound, proven, equal, and with the bytes that it says."""
    found = expand(graph, region, in_place=True)
    assert dump(parse(dump(found))) == dump(found)
    check_same(graph, found)
    return found


def victims(graph: Graph) -> list[int]:
    """Storages that loops write over."""
    return [storage for loop in loops(graph) for storage in taken_over(graph, loop)]
