"""Random regions of the networks' steps, legal ones and others."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import rustworkx as rx

from magis.errors import VerifyError
from magis.fission.candidates import connected, grow
from magis.fission.expand import expand
from magis.fission.region import Region, most_parts, region_problems
from magis.graph import Graph, Loop
from magis.graph.hazards import dependency_graph
from magis.models import resolve
from magis.rewrite.functionalize import untangle
from tests.fission.cutout import in_float64, leaving, stand_alone
from tests.ops.test_networks import SGD, graphs

NETWORKS = resolve(["all", "seed"])
LONGEST = (4, 12, 40, 120)
"""Windows of the schedule in which regions grow, in operators."""
MOST = 24
"""Parts."""


@functools.cache
def normal(name: str) -> tuple[Graph, rx.PyDiGraph[int, None]]:
    """The step of a network that fission works on, in double precision, and its order constraints."""
    *_, functional = graphs(name, SGD)
    graph = in_float64(untangle(functional))
    return graph, dependency_graph(graph)


@dataclass(frozen=True, eq=False)
class Fission:
    """A region of a step, and the step with a loop for it."""

    graph: Graph
    region: Region
    looped: Graph
    at: int
    """Position of the loop."""

    @functools.cached_property
    def pair(self) -> tuple[Graph, Graph]:
        """The region as a graph of its own, and what stands for it in the other step."""
        shown = leaving(self.graph, self.region.cuts)
        whole = stand_alone(self.graph, self.region.cuts, shown)
        made = {value for position in self.region.cuts for value in self.graph.ops[position].made()}
        stands = {p for p, op in enumerate(self.looped.ops) if p == self.at or (op.made() and set(op.made()) <= made)}
        return whole, stand_alone(self.looped, stands, shown)


def footprint(graph: Graph, region: Region) -> int:
    """Bytes of all storages that the region's operators touch."""
    ops = [graph.ops[position] for position in region.cuts]
    touched = {graph.values[value].storage for op in ops for value in (*op.inputs(), *op.made())}
    return sum(graph.storages[storage].nbytes for storage in touched)


def regions(
    graph: Graph, dag: rx.PyDiGraph[int, None], chosen: random.Random, tries: int, *, uneven: bool = False
) -> Iterator[Region]:
    """Regions that grow from a random dimension of a random tensor, within a random window; legal or not. ``uneven``:
    in parts that do not divide the dimension."""
    first: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for value in op.inputs():
            first.setdefault(value, position)
    places = [(value, dim) for value in first for dim, size in enumerate(graph.values[value].shape) if size > 1]
    for _ in range(tries if places else 0):
        value, dim = chosen.choice(places)
        end = first[value] + chosen.randint(1, chosen.choice(LONGEST))
        begin = max(0, first[value] - chosen.choice((0, 0, 0, 5)))
        cuts = grow(graph, {value: dim}, range(begin, end), dag)
        piece = connected(graph, cuts)[0] if cuts else {}
        most = most_parts(piece)
        counts = [n for n in range(2, min(most, MOST) + 1) if (most % n != 0) == uneven]
        if counts:
            yield Region(piece, chosen.choice(counts), uneven=uneven)


def drawn(name: str, seed: int, *, most_bytes: int, uneven: bool = False) -> Fission:
    """A legal fission of a network; those drawn before it are refused for the reason that was given ahead."""
    graph, dag = normal(name)
    chosen = random.Random(f"{name} {seed}")
    for region in regions(graph, dag, chosen, 10_000, uneven=uneven):
        looped = expanded(graph, region) if footprint(graph, region) <= most_bytes else None
        if looped is not None:
            return Fission(graph, region, looped, position_of_loop(looped))
    raise AssertionError(f"no region of {name} is legal")


def expanded(graph: Graph, region: Region) -> Graph | None:
    """The graph with a loop for the region, None if it is refused.

    A region is refused with the first reason that was known ahead, if any; none but a kernel refuses another one.
    """
    reasons = list(region_problems(graph, region))
    message = ""
    try:
        return expand(graph, region)
    except VerifyError as error:
        message = str(error)
    assert message == " ".join(reasons[0].split()) if reasons else "refuses the sizes of a part" in message
    return None


def position_of_loop(graph: Graph) -> int:
    (position,) = (position for position, op in enumerate(graph.ops) if op.body is not None)
    return position


def nested(fission: Fission, seed: int, *, uneven: bool = False) -> Fission | None:
    """The same with a random region of the loop's body in a loop of its own; None if nothing there can be split."""
    loop = fission.looped.ops[fission.at]
    assert loop.body is not None
    body = loop.body.graph
    for region in regions(body, dependency_graph(body), random.Random(seed), 40, uneven=uneven):
        looped = expanded(body, region)
        if looped is not None:
            new = replace(loop, body=Loop(loop.body.parts, looped))
            ops = (*fission.looped.ops[: fission.at], new, *fission.looped.ops[fission.at + 1 :])
            return Fission(fission.graph, fission.region, replace(fission.looped, ops=ops), fission.at)
    return None
