"""Verification of a graph's invariants, run after capture and after every rewrite.

The paper's published implementation simulates graphs whose operators lost an input, and such graphs can win. Here a
violated invariant raises a VerifyError that names operator, invariant and values, before the graph is used.
"""

from __future__ import annotations

from collections.abc import Iterator

from magis.errors import VerifyError
from magis.graph.loop_rules import MERGES, PART, loop_problems
from magis.graph.nodes import ARRIVED, BESIDE, BITS, ITEM_SIZE, PERSISTENT_KINDS, Graph, Op, Value

_KINDS = (*PERSISTENT_KINDS, "temporary", "host", "generator")
MOST_BYTES = 1 << 62
"""Limit on the bytes of one storage: byte counts are 64-bit."""
_IN_BODY = ("outer", "temporary", "host")
_OF_BODY = (PART, *MERGES)
_MOVES = ("magis.wait", "magis.load", "magis.rng_enter", "magis.rng_leave")


def verify(graph: Graph) -> None:
    """Raise VerifyError for the first violated invariant of the graph."""
    for problem in problems(graph):
        raise VerifyError(problem)


def problems(graph: Graph) -> Iterator[str]:
    """Yield every violated invariant of the graph as one line."""
    yield from _problems(graph, _KINDS)
    for op in graph.ops:
        if op.target in _OF_BODY:
            yield f"operator {op.id} ({op.target}): stands outside of a loop"


def _problems(graph: Graph, kinds: tuple[str, ...]) -> Iterator[str]:
    yield from _storage_problems(graph, kinds)
    yield from _value_problems(graph)
    yield from _schedule_problems(graph)
    yield from _copy_problems(graph)
    yield from _message_problems(graph)
    for op in graph.ops:
        where = f"operator {op.id} ({op.target})"
        yield from loop_problems(graph, op, where)
        if op.body is not None:
            yield from (f"{where}: {problem}" for problem in _problems(op.body.graph, _IN_BODY))


def _storage_problems(graph: Graph, kinds: tuple[str, ...]) -> Iterator[str]:
    for key, storage in graph.storages.items():
        if key != storage.id:
            yield f"storage {key} is filed under another id than its own, {storage.id}"
        if storage.kind not in kinds or not 0 <= storage.nbytes < MOST_BYTES:
            yield f"storage {key} is of kind {storage.kind!r} and has {storage.nbytes} bytes"
    for value, data in graph.constants.items():
        if value not in graph.inputs or value not in graph.values:
            yield f"the data of constant {value} belongs to no input"
        elif len(data) != graph.values[value].numel:
            yield f"constant {value} has {graph.values[value].numel} elements, its data {len(data)}"


def _value_problems(graph: Graph) -> Iterator[str]:
    for key, value in graph.values.items():
        if key != value.id:
            yield f"value {key} is filed under another id than its own, {value.id}"
        storage = graph.storages.get(value.storage)
        if storage is None:
            yield f"value {key} lies on storage {value.storage}, which does not exist"
        elif value.dtype not in ITEM_SIZE:
            yield f"value {key} has unknown data type {value.dtype!r}"
        elif value.bits != _possible_bits(value):
            yield f"value {key} is {value.dtype} with the bits {' '.join(value.bits)}"
        elif len(value.shape) != len(value.stride) or min((*value.shape, *value.stride, value.offset)) < 0:
            yield f"value {key} has shape {value.shape}, stride {value.stride}, offset {value.offset}"
        elif _end(value) > storage.nbytes:
            yield f"value {key} reaches to byte {_end(value)} of storage {storage.id}, which has {storage.nbytes}"


def _possible_bits(value: Value) -> tuple[str, ...]:
    """Return those lazy bits of the value that its dtype can have, in the order of BITS."""
    possible = {"conj": value.dtype.startswith("complex"), "neg": value.dtype != "bool"}
    return tuple(bit for bit in BITS if bit in value.bits and possible[bit])


def _end(value: Value) -> int:
    """Return the end of the value in its storage: the offset, in bytes, behind its last element."""
    if value.numel == 0:
        return 0
    last = value.offset + sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
    return (last + 1) * ITEM_SIZE[value.dtype]


def _schedule_problems(graph: Graph) -> Iterator[str]:
    defined = set(graph.inputs)
    gone: set[int] = set()
    versions = {graph.values[value].storage: 0 for value in graph.inputs if value in graph.values}
    versions.update({storage.id: 0 for storage in graph.storages.values() if storage.kind == "generator"})
    for value in graph.inputs:
        if value not in graph.values:
            yield f"the step takes value {value}, which is not described"
    ids: set[int] = set()
    for op in graph.ops:
        where = f"operator {op.id} ({op.target})"
        if op.id in ids:
            yield f"{where}: the id occurs twice"
        ids.add(op.id)
        yield from _input_problems(graph, op, where, defined, gone)
        yield from _version_problems(op, where, versions)
        yield from _unread_problems(graph, op, where)
        if op.target == "magis.wait":
            gone.update(graph.values[value].storage for value in op.inputs()[:1] if value in graph.values)
        for value in dict.fromkeys(op.made()):  # some operators return one tensor twice
            if value in defined:
                yield f"{where}: makes value {value}, which exists already"
            if value not in graph.values:
                yield f"{where}: makes value {value}, which is not described"
                continue
            defined.add(value)
            versions.setdefault(graph.values[value].storage, 0)
    for value in graph.outputs:
        if value not in defined:
            yield f"the step returns value {value}, which nothing makes"
        elif value in graph.values and graph.values[value].storage in gone:
            yield f"the step returns value {value}, whose memory was freed after swapping it out"


def _copy_problems(graph: Graph) -> Iterator[str]:
    """Yield operators that write memory while it is copied to the host, from ``magis.store`` to ``magis.wait``."""
    leaving: dict[int, tuple[int, str]] = {}  # host value -> storage that is copied, and the operator that copies it
    for op in graph.ops:
        where = f"operator {op.id} ({op.target})"
        copied = {storage for storage, _ in leaving.values()}
        for storage, _ in op.writes:
            if storage in copied:
                yield f"{where}: writes storage {storage}, which is being copied to the host"
        for value in op.inputs()[:1]:
            if op.target == "magis.store" and value in graph.values:
                leaving.update((made, (graph.values[value].storage, where)) for made in op.made())
        if op.target == "magis.wait":
            for value in op.inputs()[1:]:
                leaving.pop(value, None)
        if op.target == "magis.load" and not leaving.keys().isdisjoint(op.inputs()):
            yield f"{where}: loads what nothing has waited for, so its copy to the host may not be there yet"
    for _, where in leaving.values():
        yield f"{where}: nothing waits for the copy, so its memory may be used again too early"


def _message_problems(graph: Graph) -> Iterator[str]:
    """Yield operators that read the output, or write an input, of a collective that has not been waited for."""
    brought = {value for op in graph.ops if op.target == ARRIVED for value in op.inputs()[:1]}
    sent: dict[int, Op] = {}  # output -> collective
    for op in graph.ops if brought else ():
        where = f"operator {op.id} ({op.target})"
        if op.target == ARRIVED:
            yield from _arrival_problems(op, where, sent)
            continue
        taken, made = ({graph.values[value].storage for value in each} for each in (op.inputs(), op.made()))
        written = {storage for storage, _ in op.writes}
        view = bool(made) and made <= taken and not op.writes
        for value, message in sent.items():
            arrives, *read = (graph.values[each].storage for each in (value, *message.inputs()))
            if (arrives in taken and not view) or not written.isdisjoint((arrives, *read)):
                yield f"{where}: uses memory of the message that brings value {value}, which is still under way"
        sent.update((value, op) for value in op.made() if value in brought and op.target in BESIDE)
    for value in sent:
        yield f"the message that brings value {value} is not waited for where it was sent last"


def _arrival_problems(op: Op, where: str, sent: dict[int, Op]) -> Iterator[str]:
    """Yield errors of a ``magis.arrived(%result, *%sent)``, which takes all sent tensors to keep them alive."""
    value, named = next(iter(op.inputs()), None), op.inputs()[1:]
    message = None if value is None else sent.pop(value, None)
    if message is None:
        yield f"{where}: waits for value {value}, which no message brings"
    elif named != message.inputs():
        yield f"{where}: names {named} as sent by the message that brings value {value}, which sends {message.inputs()}"


def _input_problems(graph: Graph, op: Op, where: str, defined: set[int], gone: set[int]) -> Iterator[str]:
    for value in op.inputs():
        if value not in defined:
            yield f"{where}: takes value {value}, which nothing has made yet"
        elif value in graph.values and graph.values[value].storage in gone:
            yield f"{where}: takes value {value}, whose memory was freed after swapping it out"


def _version_problems(op: Op, where: str, versions: dict[int, int]) -> Iterator[str]:
    """Yield versions that the operator must not read or write now, and advance ``versions`` past the operator."""
    for storage, version in op.reads:
        if versions.get(storage) != version:
            yield f"{where}: reads version {version} of storage {storage}, which is at {versions.get(storage)}"
    for storage, version in op.writes:
        if versions.get(storage) != version - 1:
            yield f"{where}: writes version {version} of storage {storage}, which is at {versions.get(storage)}"
        versions[storage] = version


def _unread_problems(graph: Graph, op: Op, where: str) -> Iterator[str]:
    """Yield inputs without a version: an operator that reads memory declares the version of its contents.

    Exempt are views, which read no data, and the operators in _MOVES: each runs after the operator whose value it
    takes, by data flow, and no other operator uses that memory (a swapped tensor's version is pinned when it is
    stored).
    """
    taken = {graph.values[value].storage for value in op.inputs() if value in graph.values}
    made = {graph.values[value].storage for value in op.made() if value in graph.values}
    view = bool(made) and made <= taken and not op.writes and not op.random
    if view or op.target in _MOVES:
        return
    known = {storage for storage, _ in op.reads}
    for storage in sorted(taken - known):
        yield f"{where}: takes a value on storage {storage} without saying which version it reads"
