"""Compiler from a graph to the arrays of the search, and the map from array indices back to operators.

Nodes are the operators that do work; views are left out (they need no memory and live with their storage), and
operators that only update persistent memory are grouped into floating blocks (see ``Problem``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import rustworkx as rx

from magis.cost.machines import Times
from magis.graph import BESIDE, HOST_COPIES, Graph, Op, Ref, Value, every_op
from magis.graph.hazards import fills, is_pure_view, order_edges, row_major
from magis.ops.collectives import WAITS, is_message
from magis.ops.operators import op_info
from magis.simulate.error_order import update_behind_errors
from magis.simulate.problem import BlockRow, NodeRow, Problem, StorageRow, build_problem
from magis.simulate.simulator import MemoryProfile, bytes_inside, replay, rounded

# Groups of operators: nodes that fill a storage in several steps, and blocks that update a weight.
#
#     noise = empty_like(x); noise.bernoulli_(p); noise.div_(p)  ->  one node that makes the noise
#     all operators of AdamW on one weight                       ->  one block, which floats

Group = tuple[Op, ...]


def nodes_and_blocks(graph: Graph) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Group the operators into nodes, in program order, and update blocks; pure views are in neither."""
    views = {op.id for op in graph.ops if is_pure_view(graph.values, op)}
    sinks = _sinks(graph, views)
    if len(views) + len(sinks) == len(graph.ops):
        sinks.clear()  # blocks run after nodes: without nodes, no operator floats
    # Nodes: one operator each, but a run of operators that fills one new storage is one node.
    ops = [op for op in graph.ops if op.id not in views and op.id not in sinks]
    last_write = {storage: position for position, op in enumerate(ops) for storage, _ in op.writes}
    nodes: list[Group] = []
    position = 0
    while position < len(ops):
        end = position + 1
        made = {graph.values[value].storage for value in ops[position].made()}
        while end < len(ops) and len(made) == 1 and _only_writes(ops[end], made):
            end += 1
        if any(last_write.get(storage, position) >= end for storage in made):  # another node writes the storage, too
            end = position + 1
        nodes.append(tuple(ops[position:end]))
        position = end
    # Blocks: floating operators that share a storage which one of them writes or makes.
    floating = [op for op in graph.ops if op.id in sinks]
    own = {graph.values[value].storage for op in floating for value in op.made()}
    own |= {storage for op in floating for storage, _ in op.writes}
    links: rx.PyGraph[int, None] = rx.PyGraph()
    links.add_nodes_from(range(len(floating)))
    owner: dict[int, int] = {}
    for index, op in enumerate(floating):
        touched = {graph.values[value].storage for value in (*op.inputs(), *op.made())}
        for storage in sorted(touched & own):
            if storage in owner:
                links.add_edge(owner[storage], index, None)
            owner[storage] = index
    groups = sorted(sorted(group) for group in rx.connected_components(links))
    return tuple(nodes), tuple(tuple(floating[index] for index in group) for group in groups)


def _sinks(graph: Graph, views: set[int]) -> set[int]:
    """Return the ids of operators that float: weight updates, and writes to persistent memory without temporary inputs.

    An operator that does not float must not read their results, since it could not wait for them, nor write a storage
    that they only read, since they run at any time.
    """
    found = set()
    for op in graph.ops:
        if op.id in views or op.random or any(graph.storages[storage].kind == "generator" for storage, _ in op.writes):
            continue
        kinds = {graph.storages[graph.values[value].storage].kind for value in (*op.inputs(), *op.made())}
        if op.phase == "update" or (op.writes and "temporary" not in kinds):
            found.add(op.id)
    while True:
        _discard_met(graph, views, found)
        others = (op for op in graph.ops if op.id not in found)
        written = {storage for op in others for storage, _ in op.writes if graph.storages[storage].persistent}
        only_read = {
            op.id: {storage for storage, _ in op.reads} - {storage for storage, _ in op.writes}
            for op in graph.ops
            if op.id in found
        }
        bound = {number for number, storages in only_read.items() if written & storages}
        if not bound:
            return found
        found -= bound


def _discard_met(graph: Graph, views: set[int], found: set[int]) -> None:
    """Remove operators from ``found`` whose results are read by an operator that does not float."""
    # In reverse order, since readers of a version come after its writer: one pass is enough.
    met: set[tuple[int, int]] = set()
    taken: set[int] = set()
    for op in reversed(graph.ops):
        free = met.isdisjoint(op.writes) and taken.isdisjoint(op.made())
        if free and (op.id in found or op.id in views):
            continue
        found.discard(op.id)
        taken.update(op.inputs())
        met.update(op.reads)
        met.update((storage, version - 1) for storage, version in op.writes)


def _only_writes(op: Op, storages: set[int]) -> bool:
    """Return True if the operator writes only to these storages (and to its generator)."""
    others = [storage for storage, _ in op.writes if storage not in storages]
    return op.body is None and len(others) < len(op.writes) and len(others) == int(op.random)


GENERATOR_NS = 10_000
"""Time in ns to set and restore a generator's state around a recomputed random operator; measured: 6 us on a CPU."""


class Costs(Times, Protocol):
    """Protocol of a cost model for compiling a graph (``magis.cost.cost_model.RooflineCosts``)."""

    @property
    def rounding(self) -> int: ...
    def workspace(self, op: Op, values: Mapping[int, Value]) -> int: ...


@dataclass(frozen=True, eq=False)
class Compiled:
    """A problem, and the operators and storages of its indices.

    ``nodes[i]`` and ``blocks[i]`` are the operators of node and block i, ``storages[i]`` the graph's storage.
    """

    graph: Graph
    problem: Problem
    nodes: tuple[Group, ...]
    storages: tuple[int, ...]
    blocks: tuple[Group, ...]


def redo_form(op: Op, graph: Graph) -> Op:
    """Return the recompute form of an operator.

    The recompute form does not update running statistics again. A random operator draws from the saved generator state
    of its first run, so its recompute form neither reads nor advances the step's generator.
    """
    dropped = {s for s, _ in op.writes if graph.storages[s].kind == "generator"} if op.random else set()
    args, info = op.args, op_info(op.target)
    if info.undeclared_writes(op.args):
        args = info.without_statistics(op.args)
        dropped |= {storage for storage, _ in op.writes}
    if not dropped:
        return op
    return replace(
        op,
        args=args,
        reads=tuple(read for read in op.reads if read[0] not in dropped),
        writes=tuple(write for write in op.writes if write[0] not in dropped),
        random=False,
    )


def take_over_form(op: Op, victim: int) -> Op:
    """Return the in-place or out variant of an operator that writes its output into the input ``victim``."""
    info = op_info(op.target)
    if (out := info.out_form(op.target)) is not None:
        return replace(op, target=out[0], kwargs=(*op.kwargs, (out[1], Ref(victim))))
    args = op.args if op.args[0] == Ref(victim) else (op.args[1], op.args[0], *op.args[2:])
    return replace(op, target=info.in_place_form(op.target) or op.target, args=args)


def compile_problem(graph: Graph, costs: Costs, *, reuse: bool = True) -> Compiled:
    """Compile a verified graph whose in-place operators are functionalized where possible.

    Without ``reuse`` no operator runs in place on a dying input.
    """
    nodes, blocks = nodes_and_blocks(graph)
    facts = _Facts(graph, nodes, blocks)
    rows = [_node_row(graph, group, index, facts, costs, reuse) for index, group in enumerate(nodes)]
    updates = [_block_row(graph, block, facts, costs) for block in blocks]
    ended = {number: facts.last_write.get(storage, facts.producer[storage]) for storage, number in facts.number.items()}
    rows, updates = update_behind_errors(graph, nodes, blocks, rows, updates, ended)
    problem = build_problem(
        _with_message_times(graph, nodes, rows, updates, facts),
        [
            StorageRow(
                nbytes=rounded(graph.storages[storage].nbytes, costs.rounding),
                pinned=facts.pinned(storage),
                last_write=facts.last_write.get(storage),
                to_end=storage in facts.returned,
            )
            for storage in facts.storages
        ],
        updates,
        persistent_bytes=sum(rounded(s.nbytes, costs.rounding) for s in graph.storages.values() if s.persistent),
        xfer_ns_per_byte=1e9 / costs.link_bytes_per_s if costs.link_bytes_per_s > 0 else 0.0,
        copy_ns=costs.copy_ns,
    )
    return Compiled(graph, problem, nodes, facts.storages, blocks)


class _Facts:
    """Tables for several rows: indices, writers, final versions."""

    def __init__(self, graph: Graph, nodes: tuple[Group, ...], blocks: tuple[Group, ...]) -> None:
        self.producer: dict[int, int] = {}
        self.partial: set[int] = set()  # storages that no single value covers
        self.last_write: dict[int, int] = {}
        self.final: dict[int, int] = {}
        for index, group in enumerate(nodes):
            for op in group:
                for value in op.made():
                    storage = graph.values[value].storage
                    if graph.storages[storage].kind != "temporary" or storage in self.producer:
                        continue
                    self.producer[storage] = index
                    if not fills(graph.values[value], graph.storages[storage]):
                        self.partial.add(storage)
                for storage, version in op.writes:
                    self.last_write[storage] = index
                    self.final[storage] = version
        self.storages = tuple(sorted(self.producer, key=lambda storage: (self.producer[storage], storage)))
        self.number = {storage: index for index, storage in enumerate(self.storages)}
        written = sorted({s for block in blocks for op in block for s, _ in op.writes if graph.storages[s].persistent})
        self.written = {storage: index for index, storage in enumerate(written)}
        self.returned = {graph.values[value].storage for value in graph.outputs}
        self.extra: dict[int, set[int]] = {}
        owner = [index for index, group in enumerate(nodes) for _ in group]
        for before, after in order_edges(tuple(op for group in nodes for op in group)):
            if owner[before] != owner[after]:
                self.extra.setdefault(owner[after], set()).add(owner[before])

    def may_be_reused(self, storage: int) -> bool:
        return storage in self.number and not self.pinned(storage) and storage not in self.returned

    def pinned(self, storage: int) -> bool:
        """Return True if a node other than its producer writes the storage, or if no single tensor covers it."""
        written = storage in self.last_write and self.last_write[storage] != self.producer.get(storage)
        return written or storage in self.partial


def _victims(graph: Graph, group: Group) -> list[int]:
    """List storages in whose memory a node may make its one storage: those that its first operator may write over, if
    the others only go on in place."""
    first, *rest = group
    found = [graph.values[value].storage for value in reusable(graph, first)]
    own = {graph.values[value].storage for value in first.made()}
    touched: set[int] = set()
    for op in rest:
        if not own.issuperset((*(graph.values[value].storage for value in op.made()), *(s for s, _ in op.writes))):
            return []
        touched.update(graph.values[value].storage for value in op.inputs())
    return [storage for storage in found if storage not in touched]


def _node_row(graph: Graph, group: Group, index: int, facts: _Facts, costs: Costs, reuse: bool) -> NodeRow:
    made = sorted({s for op in group for s in _fresh_storages(graph, op)})
    taken = sorted({graph.values[value].storage for op in group for value in op.inputs()} - set(made))
    redo = tuple(redo_form(op, graph) for op in group)
    victims = _victims(graph, group) if reuse else []
    ws, tensor = _workspace(graph, group, costs)
    ns = sum(costs.nanoseconds(op, graph.values) for op in group)
    redo_ns, redo_ws, redo_tensor = ns, ws, tensor
    if redo != group:
        redo_ws, redo_tensor = _workspace(graph, redo, costs)
        redo_ns = sum(costs.nanoseconds(op, graph.values) for op in redo)
    # A node can be recomputed at any later time if it writes nothing else, and its inputs never change.
    changed = {storage for op in redo for storage, _ in op.writes}
    changed |= {storage for op in redo for storage, version in op.reads if facts.final.get(storage, 0) != version}
    return NodeRow(
        inputs=tuple(facts.number[s] for s in taken if s in facts.number),
        outputs=tuple(facts.number[s] for s in made if s in facts.number),
        ns=ns,
        ws=ws,
        tensor=tensor,
        redo_ns=redo_ns + (GENERATOR_NS if any(op.random for op in group) else 0),
        redo_ws=redo_ws,
        redo_tensor=redo_tensor,
        at_once=any(is_message(op.target) for op in group),
        copies=any(
            inner.target == "magis.store" for op in group if op.body is not None for inner, _ in every_op(op.body.graph)
        ),
        redo_ok=bool(made) and changed <= {*made} and not any(map(facts.pinned, made)),
        reuse=tuple(facts.number[s] for s in victims if facts.may_be_reused(s)),
        preads=tuple(facts.written[s] for s in taken if s in facts.written),
        extra=tuple(sorted(facts.extra.get(index, ()))),
    )


def _with_message_times(
    graph: Graph, nodes: tuple[Group, ...], rows: list[NodeRow], blocks: list[BlockRow], facts: _Facts
) -> list[NodeRow]:
    """Return the rows, with the time of overlappable collectives moved to the communication stream.

    Only the collective may read its input, and nothing may write its input or output before the collective is done.
    Graphs with explicit waits stay as they are.
    """
    targets = {op.target for op in graph.ops}
    if targets.isdisjoint(BESIDE) or not targets.isdisjoint(WAITS):
        return rows
    readers = Counter(storage for row in rows for storage in row.inputs)
    readers.update(storage for row in blocks for storage in row.inputs)
    makers = {storage: row for row in rows for storage in row.outputs}

    def can(group: Group, row: NodeRow) -> bool:
        kept = {graph.values[value].storage for value in group[0].inputs()}
        touched = (*row.inputs, *row.outputs)
        return (
            group[0].target in BESIDE
            and len(group) == 1  # nothing else writes the output
            and len(row.outputs) == 1
            and len(row.inputs) <= 1
            and all(readers[storage] == 1 and len(makers[storage].outputs) == 1 for storage in row.inputs)
            and not any(
                facts.pinned(each) or each in facts.returned for each in map(facts.storages.__getitem__, touched)
            )
            and all(storage in facts.number or storage not in facts.last_write for storage in kept)
        )

    return [
        replace(row, ns=0, redo_ns=0, message_ns=row.ns, at_once=False, reuse=()) if can(group, row) else row
        for group, row in zip(nodes, rows, strict=True)
    ]


def _fresh_storages(graph: Graph, op: Op) -> set[int]:
    """Return the storages that an operator allocates."""
    return {graph.values[value].storage for value in op.made()} - {graph.values[v].storage for v in op.inputs()}


def _workspace(graph: Graph, group: Group, costs: Costs) -> tuple[int, int]:
    """Return the peak bytes of a node beyond its inputs and outputs: in all, and of tensors alone."""
    tensors, peaks = zip(*(bytes_inside(op, graph, costs.workspace, costs.rounding) for op in group), strict=True)
    return max(peaks), max(tensors)


def _replay_alone(graph: Graph, group: Group, held: set[int], costs: Costs) -> MemoryProfile:
    """Simulate the memory of some operators alone, with the storages in ``held`` in memory throughout.

    The rest of the graph is left out, so that the time per block does not grow with the step.
    """
    values = {value: graph.values[value] for op in group for value in (*op.inputs(), *op.made())}
    touched = {value.storage for value in values.values()}
    storages = {storage: graph.storages[storage] for storage in sorted(touched)}
    return replay(
        replace(graph, ops=group, outputs=(), values=values, storages=storages),
        costs.workspace,
        rounding=costs.rounding,
        held=frozenset(held),
    )


def reusable(graph: Graph, op: Op) -> tuple[int, ...]:
    """List input values in whose memory the operator's one output may be written, best first (``realize`` does so)."""
    made = op.made()
    if len(made) != 1 or op.many or op.writes or op.random:
        return ()
    inputs = op.inputs()
    candidates: list[int] = []
    info = op_info(op.target)
    if not info.may_change_place(op.target, op.args, op.kwargs, dtype=graph.values[made[0]].dtype):
        return ()
    if info.in_place_form(op.target) is not None:
        if isinstance(op.args[0], Ref):
            candidates.append(op.args[0].value)
        if info.commutative and not op.kwargs and len(op.args) == 2 and isinstance(op.args[1], Ref):
            candidates.append(op.args[1].value)
    elif info.out_form(op.target) is not None:
        candidates.extend(inputs)
    output = graph.values[made[0]]
    if info.kind == "softmax":
        last = len(output.shape) - 1
        if op.args[info.dim] not in (last, -1) or output.stride != row_major(output.shape):
            return ()
    fresh = graph.storages[output.storage]
    storage_uses = [graph.values[value].storage for value in inputs]
    found: list[int] = []
    for candidate in dict.fromkeys(candidates):
        value = graph.values[candidate]
        same = (value.shape, value.stride, value.dtype) == (output.shape, output.stride, output.dtype)
        alone = storage_uses.count(value.storage) == 1
        storage = graph.storages[value.storage]
        whole = storage.kind == "temporary" and fills(value, storage) and fills(output, fresh)
        if same and alone and whole:
            found.append(candidate)
    return tuple(found)


def _block_row(graph: Graph, block: Group, facts: _Facts, costs: Costs) -> BlockRow:
    taken = [sorted({graph.values[value].storage for value in op.inputs()} & facts.number.keys()) for op in block]
    given = sorted({storage for row in taken for storage in row})
    written = sorted({facts.written[s] for op in block for s, _ in op.writes if s in facts.written})
    profile = _replay_alone(graph, block, set(given), costs)
    base = profile.persistent_bytes + sum(rounded(graph.storages[s].nbytes, costs.rounding) for s in given)
    late = max((position for position, row in enumerate(taken) if row), default=-1) + 1
    beside = costs.link_bytes_per_s > 0  # copies of moved state run on streams of their own
    return BlockRow(
        inputs=tuple(facts.number[s] for s in given),
        writes=tuple(written),
        ns=sum(costs.nanoseconds(op, graph.values) for op in block if not (beside and op.target in HOST_COPIES)),
        ws=max(profile.peaks[:late], default=base) - base,
        tensor=max(profile.tensors[:late], default=base) - base,
        late_ws=max(profile.peaks[late:], default=base) - base,
        late_tensor=max(profile.tensors[late:], default=base) - base,
    )
