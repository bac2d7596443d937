"""Functionalization of in-place operators, and removal of false dependences, for a search with more freedom.

    x = f(...); x.relu_(); use(x)   ->   x = f(...); y = relu(x); use(y)

The realization of a plan makes operators in-place again: an operator whose input dies overwrites it, wherever eager
does and in many other places. Weight updates and random in-place operators are not functionalized.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import rustworkx as rx

from magis.graph import Arg, Const, Graph, Op, Storage, with_inputs
from magis.graph.hazards import fills, row_major
from magis.ops.operators import op_info
from magis.rewrite.losses import LossRewriter


def functionalize(graph: Graph) -> Graph:
    """Return the step without those in-place writes to temporary storages whose later reads all use the write's
    result."""
    written = {storage for op in graph.ops for storage, _ in op.writes if op.phase != "update"}
    # the operators that read, make or write each written storage, in order
    touching: dict[int, list[Op]] = {s: [] for s in sorted(written) if graph.storages[s].kind == "temporary"}
    for op in graph.ops:
        touched = {graph.values[value].storage for value in (*op.inputs(), *op.made())}
        touched.update(storage for storage, _ in op.writes)
        for storage in touched & touching.keys():
            touching[storage].append(op)
    targets = {storage for storage, ops in touching.items() if _can_split(graph, storage, ops)}
    if not targets:
        return graph
    storages = dict(graph.storages)
    values = dict(graph.values)
    ops = []
    current: dict[int, tuple[int, int]] = {storage: (storage, 0) for storage in targets}
    for op in graph.ops:
        met = ((*current.get(storage, (storage, 0)), version) for storage, version in op.reads)
        new = replace(op, reads=tuple((owner, version - base) for owner, base, version in met))
        hit = [storage for storage, _ in op.writes if storage in targets]
        if hit:
            (old,) = hit
            fresh = Storage(len(storages), graph.storages[old].nbytes, "temporary")
            storages[fresh.id] = fresh
            current[old] = (fresh.id, dict(op.writes)[old])
            functional = op_info(op.target).functional_form(op.target) or op.target
            new = replace(new, target=functional, writes=())
        for value in new.made():
            owner = graph.values[value].storage
            if owner in targets:
                values[value] = replace(values[value], storage=current[owner][0])
        ops.append(new)
    return replace(graph, storages=storages, values=values, ops=tuple(ops))


def _can_split(graph: Graph, storage: int, ops: Iterable[Op]) -> bool:
    """Return True if every write to the storage has a functional variant, covers the storage, and is read only through
    its result; ``ops`` are the operators on the storage."""
    seen: set[int] = set()  # values that show the newest contents
    for op in ops:
        touched = [value for value in op.inputs() if graph.values[value].storage == storage]
        if any(value not in seen for value in touched):
            return False
        made = [value for value in op.made() if graph.values[value].storage == storage]
        if any(s == storage for s, _ in op.writes):
            if not _covers(graph, op, storage, touched):
                return False
            seen = set(made)
        else:
            seen.update(made)
    return True


def _covers(graph: Graph, op: Op, storage: int, touched: list[int]) -> bool:
    info = op_info(op.target)
    functional = info.functional_form(op.target)
    if functional is None or op.random or len(touched) != 1 or len(op.writes) != 1:
        return False
    value = graph.values[touched[0]]
    if not info.may_change_place(functional, op.args, op.kwargs, dtype=value.dtype):
        return False
    # The functional variant would promote to another dtype than the written tensor's; masks do not promote.
    masked = op.target.startswith("aten.masked_fill_")
    if not masked and any(graph.values[other].dtype != value.dtype for other in op.inputs()):
        return False
    return op.inputs()[0] == value.id and fills(value, graph.storages[storage])


# Removal of false dependences, so that more of the step can be split or moved.
#
#     ones_like(loss)           ->  full([], 1)                      only the shape of ``loss`` mattered
#     nll_loss(x, t) by mean    ->  nll_loss(x, t) by sum / (t != ignored).sum()
#     nll_loss_backward by sum  ->  the same with a weight of 0     a sum is not divided by the total weight
#     mse_loss(x, t)            ->  mean((x - t)^2)                  on a storage of its own size
#     mse_loss_backward by mean ->  (x - t) * (2 / count) * gradient      a part would count its own elements
#     view(f(view(x)))          ->  f(x)                             f element-wise, the outer view as x was
#
# The rewrites of losses let loss and gradient be split together: the number of targets depends on the targets alone, a
# sum needs none, and the number of elements is known, so the backward of a part need not wait for the loss of other
# parts. The last one keeps rows of batch and length merged (`logits.float().view(-1, n)`), which can then be cut
# anywhere, not only between sequences. All are bitwise exact.

_FILL: dict[str, float] = {"ones": 1, "zeros": 0}


def untangle(graph: Graph) -> Graph:
    """Return the step without false dependences."""
    graph = _without_views_around(graph)
    found = LossRewriter(dict(graph.storages), dict(graph.values))
    for op in graph.ops:
        factory = _factory(graph, op)
        if factory is not None:
            found.ops.append(factory)
        elif not found.by_itself(op):
            found.ops.append(op)
    return found.step(graph)


_VIEWS = ("aten.view.default", "aten._unsafe_view.default")


def _without_views_around(graph: Graph) -> Graph:
    """Return the step with groups of element-wise calls in the shape of the tensors that they see through views.

    A group takes and gives full-size tensors through views alone: scores of (batch, token, word) that a soft cap
    changes between a product and a loss on merged rows, forward and backward.
    """
    maker = {value: op for op in graph.ops for value in op.made()}
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in dict.fromkeys(op.inputs()):
            readers.setdefault(value, []).append(op)

    def is_plain(value: int) -> bool:
        return graph.values[value].stride == row_major(graph.values[value].shape) and not graph.values[value].bits

    def full_size(op: Op) -> list[int]:
        return [value for value in op.inputs() if graph.values[value].shape]

    def may_change(op: Op) -> bool:
        if len(op.outputs) != 1 or op.writes or op.random or op.many or op.phase == "update":
            return False
        if any(isinstance(arg, Const) and arg.name.startswith("channels_last") for _, arg in op.kwargs):
            return False
        every = (*full_size(op), *op.made())
        one_shape = len({graph.values[value].shape for value in every}) == 1 < len(every)
        return op_info(op.target).split == "reductions.pointwise" and one_shape and all(map(is_plain, every))

    calls = {op.id: op for op in graph.ops if may_change(op)}
    links: rx.PyGraph[int, None] = rx.PyGraph()
    node = {number: links.add_node(number) for number in calls}
    for number, op in calls.items():
        makers = (maker[value].id for value in full_size(op) if value in maker)
        links.add_edges_from_no_data([(node[number], node[other]) for other in makers if other in node])
    values = dict(graph.values)
    grouped: set[int] = set()
    opened: dict[int, int] = {}  # view that a group takes -> what it shows
    closed: dict[int, int] = {}  # view of what a group makes -> the same in the new shape
    for part in rx.connected_components(links):
        group = {links[each] for each in part}
        made = {calls[number].made()[0] for number in group}
        taken = {value for number in group for value in full_size(calls[number])} - made
        before = {value: maker[value] for value in taken if value in maker}
        behind = [(op, value) for value in made for op in readers.get(value, ()) if op.id not in group]
        if len(before) < len(taken) or not behind or not before:
            continue
        if any(op.target not in _VIEWS for op in (*before.values(), *(op for op, _ in behind))):
            continue
        shown = {value: op.inputs()[0] for value, op in before.items()}
        given = {op.made()[0]: value for op, value in behind}
        shapes = {graph.values[value].shape for value in (*shown.values(), *given)}
        kept = not set(graph.outputs) & {*made, *given} and not (closed.keys() & taken or opened.keys() & given.keys())
        if len(shapes) == 1 and kept and all(map(is_plain, (*shown.values(), *given))):
            (shape,) = shapes
            grouped, opened, closed = grouped | group, opened | shown, closed | given
            values |= {value: replace(values[value], shape=shape, stride=row_major(shape)) for value in made}
    opened = {value: closed.get(shown, shown) for value, shown in opened.items()}
    ops = [with_inputs(op, closed | opened if op.id in grouped else closed) for op in graph.ops]
    ops = [op for op in ops if not (op.target in _VIEWS and op.made()[0] in closed)]
    used = set(graph.outputs).union(*(op.inputs() for op in ops))  # an unread view would keep its base alive
    ops = [op for op in ops if op.target not in _VIEWS or used & set(op.made())]
    return replace(graph, values=values, ops=tuple(replace(op, id=number) for number, op in enumerate(ops)))


def _factory(graph: Graph, op: Op) -> Op | None:
    """Return an operator like `ones_like` or `new_zeros` as a factory (`full`, `empty`) without its input; None for
    other operators, and for results that are not row-major."""
    name = op.target.split(".")[1] if op.target.endswith(".default") else ""
    given = name.startswith("new_")
    what = name.removeprefix("new_") if given else name.removesuffix("_like")
    if what == name or not (what in _FILL or what in ("full", "empty")):
        return None
    value = graph.values[op.made()[0]]
    if value.stride != row_major(value.shape) or op.writes:
        return None
    order = tuple(pair for pair in op.reads if graph.storages[pair[0]].kind == "generator")
    kwargs: tuple[tuple[str, Arg], ...] = (
        ("device", dict(op.kwargs).get("device") or Const("device", "cpu")),
        ("dtype", Const("dtype", value.dtype)),
    )
    if what == "empty":
        return replace(op, target="aten.empty.memory_format", args=(value.shape,), kwargs=kwargs, reads=order)
    fill: Arg = op.args[2 if given else 1] if what == "full" else _FILL[what]
    return replace(op, target="aten.full.default", args=(value.shape, fill), kwargs=kwargs, reads=order)
