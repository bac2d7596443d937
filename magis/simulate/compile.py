"""A graph as the arrays that the search works on, and the way back from array indices to operators.

Nodes are the operators that do work; views are left out (they cost no memory and follow their storage), and what only
updates persistent memory is gathered into blocks that float (see ``Problem``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import rustworkx as rx

from magis.analysis.hazards import is_pure_view, order_edges
from magis.analysis.windows import fills
from magis.aten.facts import COMMUTATIVE, IN_PLACE_FORM, OUT_FORM, undeclared_writes, without_statistics
from magis.ir import Graph, Op, Ref, Value
from magis.simulate.problem import BlockRow, NodeRow, Problem, StorageRow, build_problem
from magis.simulate.replay import replay, rounded


class Costs(Protocol):
    """What the arrays need of a cost model (``magis.cost.model.CostModel``)."""

    @property
    def rounding(self) -> int: ...
    @property
    def link_bytes_per_s(self) -> float: ...
    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int: ...
    def workspace(self, op: Op, values: Mapping[int, Value]) -> int: ...


@dataclass(frozen=True, eq=False)
class Compiled:
    """A problem and what its indices stand for.

    ``nodes[i]`` and ``blocks[i]`` are the operators of node and block i, ``storages[i]`` the graph's storage.
    """

    graph: Graph
    problem: Problem
    nodes: tuple[Op, ...]
    storages: tuple[int, ...]
    blocks: tuple[tuple[Op, ...], ...]


def redo_form(op: Op) -> Op:
    """The operator as it runs when it is run again: without updating running statistics a second time."""
    if not undeclared_writes(op.target, op.args):
        return op
    written = {storage for storage, _ in op.writes}
    return replace(
        op,
        args=without_statistics(op.target, op.args),
        reads=tuple(read for read in op.reads if read[0] not in written),
        writes=(),
    )


def compile_problem(graph: Graph, costs: Costs, *, reuse: bool = True) -> Compiled:
    """The arrays of a verified graph whose in-place operators are in functional form where possible.

    Without ``reuse`` no operator takes over the memory of a dying input.
    """
    views = {op.id for op in graph.ops if is_pure_view(graph, op)}
    sinks = _sinks(graph, views)
    nodes = tuple(op for op in graph.ops if op.id not in views and op.id not in sinks)
    blocks = _blocks(graph, sinks)
    facts = _Facts(graph, nodes, blocks)
    problem = build_problem(
        [_node_row(graph, op, index, facts, costs, reuse) for index, op in enumerate(nodes)],
        [_storage_row(graph, storage, facts, costs) for storage in facts.storages],
        [_block_row(graph, block, facts, costs) for block in blocks],
        persistent_bytes=sum(rounded(s.nbytes, costs.rounding) for s in graph.storages.values() if s.persistent),
        xfer_ns_per_byte=1e9 / costs.link_bytes_per_s if costs.link_bytes_per_s > 0 else 0.0,
    )
    return Compiled(graph, problem, nodes, facts.storages, blocks)


def _sinks(graph: Graph, views: set[int]) -> set[int]:
    """Operators that float: weight updates, and writes to persistent memory that no temporary storage feeds."""
    found = set()
    for op in graph.ops:
        if op.id in views or op.random:
            continue
        kinds = {graph.storages[graph.values[value].storage].kind for value in (*op.inputs(), *op.made())}
        if op.phase == "update" or (op.writes and "temporary" not in kinds):
            found.add(op.id)
    return found


def _blocks(graph: Graph, sinks: set[int]) -> tuple[tuple[Op, ...], ...]:
    """Sinks that belong together: they touch a storage that one of them writes or makes."""
    ops = [op for op in graph.ops if op.id in sinks]
    own = {graph.values[value].storage for op in ops for value in op.made()}
    own |= {storage for op in ops for storage, _ in op.writes}
    links: rx.PyGraph[int, None] = rx.PyGraph()
    links.add_nodes_from(range(len(ops)))
    owner: dict[int, int] = {}
    for index, op in enumerate(ops):
        touched = {graph.values[value].storage for value in (*op.inputs(), *op.made())}
        for storage in sorted(touched & own):
            if storage in owner:
                links.add_edge(owner[storage], index, None)
            owner[storage] = index
    groups = [sorted(group) for group in rx.connected_components(links)]
    return tuple(tuple(ops[index] for index in group) for group in sorted(groups))


class _Facts:
    """What several rows ask for: numberings, writers, final versions."""

    def __init__(self, graph: Graph, nodes: tuple[Op, ...], blocks: tuple[tuple[Op, ...], ...]) -> None:
        self.producer: dict[int, int] = {}
        self.last_write: dict[int, int] = {}
        self.final: dict[int, int] = {}
        self.node_written: set[int] = set()
        for index, op in enumerate(nodes):
            for value in op.made():
                storage = graph.values[value].storage
                if graph.storages[storage].kind == "temporary":
                    self.producer.setdefault(storage, index)
            for storage, version in op.writes:
                self.last_write[storage] = index
                self.final[storage] = version
                self.node_written.add(storage)
        self.storages = tuple(sorted(self.producer, key=lambda storage: (self.producer[storage], storage)))
        self.number = {storage: index for index, storage in enumerate(self.storages)}
        written = sorted({s for block in blocks for op in block for s, _ in op.writes if graph.storages[s].persistent})
        self.written = {storage: index for index, storage in enumerate(written)}
        self.returned = {graph.values[value].storage for value in graph.outputs}
        self.extra: dict[int, set[int]] = {}
        for before, after in order_edges(nodes):
            self.extra.setdefault(after, set()).add(before)

    def pinned(self, storage: int) -> bool:
        return storage in self.node_written


def _node_row(graph: Graph, op: Op, index: int, facts: _Facts, costs: Costs, reuse: bool) -> NodeRow:
    taken = sorted({graph.values[value].storage for value in op.inputs()})
    made = sorted({graph.values[value].storage for value in op.made()} - set(taken))
    redo = redo_form(op)
    redo_ok = (
        not op.random
        and not redo.writes
        and all(facts.final.get(storage, 0) == version for storage, version in redo.reads)
        and not any(facts.pinned(storage) for storage in made)
        and bool(made)
    )
    candidates = reusable(graph, op) if reuse else ()
    return NodeRow(
        inputs=tuple(facts.number[s] for s in taken if s in facts.number),
        outputs=tuple(facts.number[s] for s in made if s in facts.number),
        ns=costs.nanoseconds(op, graph.values),
        ws=costs.workspace(op, graph.values),
        redo_ns=costs.nanoseconds(redo, graph.values),
        redo_ws=costs.workspace(redo, graph.values),
        redo_ok=redo_ok,
        reuse=tuple(facts.number[graph.values[v].storage] for v in candidates if _may_reuse(graph, v, facts)),
        preads=tuple(facts.written[s] for s in taken if s in facts.written),
        extra=tuple(sorted(facts.extra.get(index, ()))),
    )


def _may_reuse(graph: Graph, value: int, facts: _Facts) -> bool:
    storage = graph.values[value].storage
    return storage in facts.number and not facts.pinned(storage) and storage not in facts.returned


def reusable(graph: Graph, op: Op) -> tuple[int, ...]:
    """Input values whose memory the operator's one output may take over, best first (``realize`` does it)."""
    made = op.made()
    if len(made) != 1 or op.many or op.writes or op.random:
        return ()
    inputs = op.inputs()
    candidates: list[int] = []
    if op.target in IN_PLACE_FORM:
        if isinstance(op.args[0], Ref):
            candidates.append(op.args[0].value)
        if op.target in COMMUTATIVE and not op.kwargs and len(op.args) == 2 and isinstance(op.args[1], Ref):
            candidates.append(op.args[1].value)
    elif op.target in OUT_FORM:
        candidates.extend(inputs)
    output = graph.values[made[0]]
    fresh = graph.storages[output.storage]
    storage_uses = [graph.values[value].storage for value in inputs]
    found: list[int] = []
    for candidate in candidates:
        value = graph.values[candidate]
        same = (value.shape, value.stride, value.dtype) == (output.shape, output.stride, output.dtype)
        alone = storage_uses.count(value.storage) == 1
        storage = graph.storages[value.storage]
        whole = storage.kind == "temporary" and fills(value, storage) and fills(output, fresh)
        if same and alone and whole and candidate not in found:
            found.append(candidate)
    return tuple(found)


def _storage_row(graph: Graph, storage: int, facts: _Facts, costs: Costs) -> StorageRow:
    return StorageRow(
        nbytes=rounded(graph.storages[storage].nbytes, costs.rounding),
        pinned=facts.pinned(storage),
        last_write=facts.last_write.get(storage),
        to_end=storage in facts.returned,
    )


def _block_row(graph: Graph, block: tuple[Op, ...], facts: _Facts, costs: Costs) -> BlockRow:
    storages = sorted({graph.values[value].storage for op in block for value in op.inputs()})
    given = [graph.storages[s].nbytes for s in storages if s in facts.number]
    inputs = tuple(facts.number[s] for s in storages if s in facts.number)
    written = sorted({facts.written[s] for op in block for s, _ in op.writes if s in facts.written})
    alone = replace(graph, ops=block, outputs=())
    before = sum(rounded(n, costs.rounding) for n in given)
    profile = replay(
        alone, lambda op: costs.workspace(op, graph.values), rounding=costs.rounding, held=frozenset(storages)
    )
    base = profile.persistent_bytes + before
    return BlockRow(
        inputs=inputs,
        writes=tuple(written),
        ns=sum(costs.nanoseconds(op, graph.values) for op in block),
        ws=profile.peak_bytes - base,
        tensor=profile.tensor_bytes - base,
    )
