"""Random changes of a loop's body."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from magis.graph import Arg, Graph, Loop, Op, Ref, Value, replace_refs
from magis.graph.loop_rules import JOIN, PART, REDUCE, rows_around
from magis.ops.splits import COMBINATIONS

Change = Callable[[Graph, random.Random], Graph | None]


def bodies(graph: Graph) -> Iterator[tuple[int, ...]]:
    """Where the loops stand: positions from the outermost to the innermost."""
    for position, op in enumerate(graph.ops):
        if op.body is not None:
            yield (position,)
            yield from ((position, *rest) for rest in bodies(op.body.graph))


def edited(graph: Graph, path: tuple[int, ...], change: Callable[[Graph], Graph | None]) -> Graph | None:
    """The graph with the body at the path changed; None if it cannot be."""
    if not path:
        return change(graph)
    loop = graph.ops[path[0]]
    if loop.body is None:
        return None
    body = edited(loop.body.graph, path[1:], change)
    return None if body is None else with_op(graph, path[0], replace(loop, body=Loop(loop.body.parts, body)))


def with_op(graph: Graph, position: int, op: Op) -> Graph:
    return replace(graph, ops=(*graph.ops[:position], op, *graph.ops[position + 1 :]))


def some(graph: Graph, chosen: random.Random, *targets: str) -> int | None:
    """The position of one of the operators of these kinds, or of any aten operator."""
    found = [p for p, op in enumerate(graph.ops) if op.target in targets or (not targets and "aten." in op.target)]
    return chosen.choice(found) if found else None


def join_along_another(graph: Graph, chosen: random.Random) -> Graph | None:
    at = some(graph, chosen, JOIN)
    if at is None:
        return None
    op = graph.ops[at]
    rank = len(graph.values[op.inputs()[0]].shape)
    others = [dim for dim in range(rank) if dim != op.args[2]]
    return with_op(graph, at, replace(op, args=(*op.args[:2], chosen.choice(others)))) if others else None


def other_rows(graph: Graph, chosen: random.Random) -> Graph | None:
    """As many rows around a stretch, but other ones."""
    found = [p for p, op in enumerate(graph.ops) if op.target in (PART, JOIN) and any(rows_around(op))]
    if not found:
        return None
    at = chosen.choice(found)
    op = graph.ops[at]
    before, after = rows_around(op)
    other = chosen.choice([rows for rows in range(before + after + 1) if rows != before])
    return with_op(graph, at, replace(op, args=(*op.args[:-2], other, before + after - other)))


def join_reduced(graph: Graph, chosen: random.Random) -> Graph | None:
    at = some(graph, chosen, JOIN)
    how = chosen.choice(COMBINATIONS)
    return (
        with_op(graph, at, replace(graph.ops[at], target=REDUCE, args=(*graph.ops[at].args[:2], how)))
        if (at is not None)
        else None
    )


def reduce_otherwise(graph: Graph, chosen: random.Random) -> Graph | None:
    at = some(graph, chosen, REDUCE)
    if at is None:
        return None
    op = graph.ops[at]
    others = [how for how in COMBINATIONS if how != op.args[-1]]
    return with_op(graph, at, replace(op, args=(*op.args[:2], chosen.choice(others))))


def stretch_of_another_dimension(graph: Graph, chosen: random.Random) -> Graph | None:
    """With the shape that this stretch has: what takes it is not told."""
    at = some(graph, chosen, PART)
    if at is None or any(rows_around(graph.ops[at])):
        return None
    op = graph.ops[at]
    (whole,), (made,) = op.inputs(), op.made()
    known, looks = graph.values[whole].shape, graph.values[made]
    parts = next(a // b for a, b in zip(known, looks.shape, strict=True) if a != b)
    others = [dim for dim, size in enumerate(known) if dim != op.args[-1] and size % parts == 0]
    if not others:
        return None
    dim = chosen.choice(others)
    shape = tuple(size // parts if index == dim else size for index, size in enumerate(known))
    values = {**graph.values, made: replace(looks, shape=shape)}
    return with_op(replace(graph, values=values), at, replace(op, args=(Ref(whole), dim)))


def alike(left: Value, right: Value) -> bool:
    return (left.shape, left.stride, left.dtype) == (right.shape, right.stride, right.dtype)


def another_argument(graph: Graph, chosen: random.Random) -> Graph | None:
    """A value is taken for another one that looks the same."""
    at = some(graph, chosen, *{op.target for op in graph.ops if op.inputs()})
    if at is None:
        return None
    op = graph.ops[at]
    taken = chosen.choice(op.inputs())
    before = {*graph.inputs, *(value for earlier in graph.ops[:at] for value in earlier.made())}
    others = [v for v in sorted(before - {taken}) if alike(graph.values[v], graph.values[taken])]
    if not others:
        return None
    names = {taken: chosen.choice(others)}
    args = replace_refs(op.args, names)
    kwargs = tuple((name, replace_refs(arg, names)) for name, arg in op.kwargs)
    return with_op(graph, at, replace(op, args=args if isinstance(args, tuple) else (args,), kwargs=kwargs))


def another_literal(graph: Graph, chosen: random.Random) -> Graph | None:
    at = some(graph, chosen)
    if at is None:
        return None
    op = graph.ops[at]
    places = [index for index, arg in enumerate(op.args) if isinstance(arg, (int, float, tuple))]
    if not places:
        return None
    index = chosen.choice(places)
    args = [*op.args[:index], _other(op.args[index], chosen), *op.args[index + 1 :]]
    return with_op(graph, at, replace(op, args=tuple(args)))


def _other(arg: Arg, chosen: random.Random) -> Arg:
    if isinstance(arg, bool):
        return not arg
    if isinstance(arg, int):
        return chosen.choice([arg * 2, arg + 1, 0])
    if isinstance(arg, float):
        return arg + 0.5
    if isinstance(arg, tuple) and arg:
        index = chosen.randrange(len(arg))
        return (*arg[:index], _other(arg[index], chosen), *arg[index + 1 :])
    return arg


TWINS = {"add": "sub", "sub": "add", "mul": "div", "div": "mul", "relu": "neg", "exp": "abs", "gelu": "silu"}


def another_operator(graph: Graph, chosen: random.Random) -> Graph | None:
    found = [p for p, op in enumerate(graph.ops) if op.target.startswith("aten.") and op.target.split(".")[1] in TWINS]
    if not found:
        return None
    at = chosen.choice(found)
    _, name, overload = graph.ops[at].target.split(".")
    return with_op(graph, at, replace(graph.ops[at], target=f"aten.{TWINS[name]}.{overload}"))


CHANGES: tuple[Change, ...] = (
    join_along_another, join_reduced, reduce_otherwise, stretch_of_another_dimension, other_rows, another_argument,
    another_literal, another_operator,
)  # fmt: skip


def mutants(graph: Graph, seed: int, count: int) -> Iterator[tuple[str, Graph]]:
    """Changed graphs with the kinds of their changes."""
    chosen = random.Random(seed)
    paths = list(bodies(graph))
    made = 0
    for at in range(20 * count):
        change = CHANGES[(seed + at) % len(CHANGES)]
        mutant = edited(graph, chosen.choice(paths), lambda body, change=change: change(body, chosen))
        if mutant is not None and mutant != graph:
            yield change.__name__, mutant
            made += 1
            if made == count:
                return
