"""Plans with one thing changed, as somebody would who wants other numbers from a file that still looks sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from magis.graph import Arg, Const, Graph, Loop, Op, Ref, Scalar, Value, replace_refs


def recounted(graph: Graph) -> Graph:
    """The graph with storage versions that fit together again."""
    versions: dict[int, int] = {}
    ops = []
    for op in graph.ops:
        reads = tuple((storage, versions.get(storage, 0)) for storage, _ in op.reads)
        for storage, _ in op.writes:
            versions[storage] = versions.get(storage, 0) + 1
        ops.append(replace(op, reads=reads, writes=tuple((storage, versions[storage]) for storage, _ in op.writes)))
    return replace(graph, ops=tuple(ops))


def mutants(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """Graphs with one thing changed, by the kind of the change."""
    for at, op in enumerate(graph.ops):
        yield "drop", _dropped(graph, at)
        yield (
            "twice",
            recounted(replace(graph, ops=(*graph.ops[: at + 1], replace(op, id=99_999), *graph.ops[at + 1 :]))),
        )
        yield (
            "order",
            recounted(replace(graph, ops=(*graph.ops[:at], *graph.ops[at : at + 2][::-1], *graph.ops[at + 2 :]))),
        )
        for kind, other in _others(graph, at):
            yield kind, recounted(replace(graph, ops=(*graph.ops[:at], other, *graph.ops[at + 1 :])))
        if op.body is not None:
            for kind, body in mutants(op.body.graph):
                other = replace(op, body=Loop(op.body.parts, body))
                yield f"body: {kind}", replace(graph, ops=(*graph.ops[:at], other, *graph.ops[at + 1 :]))
    for key, value in graph.values.items():
        swapped = [each for each in graph.values.values() if each.id != key and _looks(each) == _looks(value)]
        for other in swapped[:3]:
            named = {key: replace(value, name=other.name), other.id: replace(other, name=value.name)}
            yield "names", replace(graph, values=graph.values | named)
        for changed in (
            replace(value, stride=value.stride[::-1]), replace(value, offset=value.offset + 1),
            replace(value, shape=value.shape[::-1]), replace(value, dtype="int32"), replace(value, bits=("neg",)),
        ):  # fmt: skip
            yield "looks", replace(graph, values={**graph.values, key: changed})
    for key, storage in graph.storages.items():
        yield "bytes", replace(graph, storages={**graph.storages, key: replace(storage, nbytes=storage.nbytes + 4)})
        yield "kind", replace(graph, storages={**graph.storages, key: replace(storage, kind="parameter")})
    for key, data in graph.constants.items():
        yield "constant", replace(graph, constants={**graph.constants, key: (*data[:-1], data[-1] + 1)})
    yield "outputs", replace(graph, outputs=graph.outputs[::-1])


def _looks(value: Value) -> tuple[object, ...]:
    return value.shape, value.stride, value.dtype


def _moved(op: Op, graph: Graph, mapping: dict[int, int]) -> Op:
    """The operator on other values, which it says that it reads and writes."""
    storages = {graph.values[one].storage: graph.values[other].storage for one, other in mapping.items()}
    kwargs = tuple((name, replace_refs(arg, mapping)) for name, arg in op.kwargs)
    taken = replace(op, args=tuple(replace_refs(arg, mapping) for arg in op.args), kwargs=kwargs)
    kept = {storage for storage, _ in op.reads if graph.storages[storage].kind == "generator"}
    reads = kept | {graph.values[value].storage for value in taken.inputs()} if op.reads else set()
    writes = tuple((storages.get(storage, storage), version) for storage, version in op.writes)
    return replace(taken, reads=tuple((storage, 0) for storage in sorted(reads)), writes=writes)


def _dropped(graph: Graph, at: int) -> Graph:
    """Without an operator: what took its results takes what it was made of, or something that looks like it."""
    op, earlier = graph.ops[at], [*graph.inputs, *(value for each in graph.ops[:at] for value in each.made())]
    mapping = {}
    for made in op.made():
        looks = graph.values[made]
        first = [value for value in op.inputs() if graph.values[value].storage == looks.storage]
        alike = [value for value in earlier if _looks(graph.values[value]) == _looks(looks)]
        if first or alike:
            mapping[made] = (*first, *alike)[0]
    rest = (
        _moved(each, graph, mapping) if mapping.keys() & set(each.inputs()) else each for each in graph.ops[at + 1 :]
    )
    outputs = tuple(mapping.get(value, value) for value in graph.outputs)
    return recounted(replace(graph, ops=(*graph.ops[:at], *rest), outputs=outputs))


def _others(graph: Graph, at: int) -> Iterator[tuple[str, Op]]:
    op, earlier = graph.ops[at], [*graph.inputs, *(value for each in graph.ops[:at] for value in each.made())]
    for one in dict.fromkeys(op.inputs()):
        alike = [v for v in earlier if v != one and _looks(graph.values[v]) == _looks(graph.values[one])]
        for other in (*alike[:3], *alike[-3:]):
            yield "other", _moved(op, graph, {one: other, other: one})
    arguments: Arg = (op.args, tuple(arg for _, arg in op.kwargs))
    for path, literal in _literals(arguments):
        for other_literal in _instead(literal):
            changed: Any = _put(arguments, path, other_literal)
            kwargs = tuple((name, arg) for (name, _), arg in zip(op.kwargs, changed[1], strict=True))
            yield "literal", replace(op, args=changed[0], kwargs=kwargs)
    for target in sorted({each.target for each in graph.ops if each.body is None} - {op.target}):
        if op.body is None:
            yield "operator", replace(op, target=target)
    yield "unwritten", replace(op, writes=())
    yield "many", replace(op, many=not op.many)
    yield "random", replace(op, random=not op.random)
    yield "origin", replace(op, origin=0)
    if op.body is not None:
        yield from (("parts", replace(op, body=Loop(parts, op.body.graph))) for parts in (1, 2, 2 * op.body.parts))


def _literals(arg: Arg, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Arg]]:
    if isinstance(arg, tuple):
        for at, item in enumerate(arg):
            yield from _literals(item, (*path, at))
    elif not isinstance(arg, Ref):
        yield path, arg


def _put(arg: Any, path: tuple[int, ...], literal: Arg) -> Any:
    if not path:
        return literal
    return tuple(_put(item, path[1:], literal) if at == path[0] else item for at, item in enumerate(arg))


def _instead(literal: Arg) -> list[Arg]:
    match literal:
        case bool():
            return [not literal]
        case int():
            return [literal + 1, -literal or 7]
        case float():
            return [literal * 2 + 1, literal + 1e-6]
        case Scalar(name):
            return [Scalar(f"{name}x"), 1.0]
        case Const("dtype", name):
            return [Const("dtype", "float64" if name != "float64" else "int32")]
        case None:
            return [1, True]
    return []
