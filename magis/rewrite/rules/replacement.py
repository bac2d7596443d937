"""Replacement of matched calls by the calls of a draft."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import rustworkx as rx

from magis.cost.shapes import Made, describe
from magis.cost.signature import signature
from magis.errors import VerifyError
from magis.graph import ITEM_SIZE, Const, Graph, Op, Ref, Storage, with_inputs
from magis.graph.hazards import dependency_graph, fills, row_major
from magis.ops.operators import op_info
from magis.rewrite.rules.draft import Draft, Refused
from magis.rewrite.rules.operator_forms import ABSOLUTE, is_elementwise


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of the graph: users of a value take its replacement in ``instead``; the calls in ``ops``, and all that
    only they need, are removed."""

    draft: Draft
    ops: Sequence[int]
    instead: Mapping[int, int]

    @property
    def stretch(self) -> tuple[int, int]:
        """Return the positions of the first and the last removed call."""
        places = [self.draft.position[number] for number in self.ops]
        return min(places), max(places)


def replaced(edits: Sequence[Edit]) -> Graph:
    """Apply edits of disjoint calls, whose drafts share their tables, and return the graph.

    Raises Refused if no legal graph results, or one edit changes calls or tensors of another.
    """
    before = edits[0].draft.graph
    change = _Change(edits)
    gone = frozenset(number for edit in edits for number in edit.ops)
    added: dict[int, list[Op]] = {}
    for edit in edits:
        added.setdefault(edit.stretch[0], []).extend(edit.draft.added)
    rows: list[tuple[int, Op]] = []
    for position, op in enumerate(before.ops):
        rows.extend((2 * position, new) for new in added.get(position, ()))
        renewed = change.renewed(op)
        if len(edits) > 1 and op.id in gone and (renewed != [op] or change.moved(op)):
            raise Refused("another edit changes the call")
        rows.extend((2 * position + 1, new) for new in renewed)
    outputs = tuple(change.returned(value) for value in before.outputs)
    rows = _pruned(rows, outputs, gone.union(op.id for each in added.values() for op in each), before)
    stretches: list[tuple[int, int]] = []  # overlapping ones merged
    for low, high in sorted(edit.stretch for edit in edits):
        if stretches and low <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(high, stretches[-1][1]))
        else:
            stretches.append((low, high))
    placed = _ordered(before, rows, change, stretches)
    # Without values that nothing makes and storages that nothing lies on.
    known = {*before.inputs, *(value for op in placed for value in op.made())}
    values = {key: value for key, value in change.values.items() if key in known}
    used = {value.storage for value in values.values()}
    storages = {k: s for k, s in change.storages.items() if k in used or s.kind == "generator"}
    return replace(Graph(storages, values, placed, before.inputs, outputs), constants=before.constants)


class _Change:
    """Operators with replaced inputs, and the new layouts of their outputs."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        draft = edits[-1].draft
        self.before = draft.graph
        self.values = draft.values
        self.storages = draft.storages
        self._fresh = draft.fresh
        self._instead = {old: new for edit in edits for old, new in edit.instead.items()}
        self._changed = set(self._instead.values())
        for old, new in self._instead.items():
            one, other = self.values[old], self.values[new]
            if (one.shape, one.dtype, one.bits) != (other.shape, other.dtype, other.bits):
                raise Refused("the results look different")

    def renewed(self, op: Op) -> list[Op]:
        """Return the operator with its new inputs, preceded by copies that it may need."""
        taken = [self._instead.get(value, value) for value in op.inputs()]
        if not any(value in self._changed for value in taken):
            return [op]
        if op.target.startswith("magis."):
            # A loop depends on its tensors' storages; a swap frees the whole storage.
            raise Refused(f"{op.target} would meet another tensor")
        new = with_inputs(op, self._instead)
        if op.target.startswith(ABSOLUTE):
            for value, other in zip(op.inputs(), taken, strict=True):
                old, looks = self.before.values[value], self.values[other]
                if (looks.offset, looks.stride) != (old.offset, old.stride):
                    raise Refused(f"{op.target} names a place in memory, which would be another one")
        if signature(op, self.before.values) == signature(new, self.values):
            return [self._relocated(op, new)]
        info = op_info(op.target)
        drawn = op.random and info.attention is None  # attention draws by row and column, others by address
        if drawn or not (info.view or info.any_layout or is_elementwise(op) or op.phase == "update"):
            return self._on_copies(op, new)
        try:
            made = describe(new, self.values)
        except VerifyError:
            return self._on_copies(op, new)
        return [self._with_new_results(op, new, made)]

    def moved(self, op: Op) -> bool:
        """Return True if an input or output of the call has changed."""
        return any(self.values[value] != self.before.values[value] for value in (*op.inputs(), *op.made()))

    def returned(self, value: int) -> int:
        """Return the replacement of an output of the step. Raises Refused if it would be a view of larger memory."""
        new = self._instead.get(value, value)
        if new not in self._changed:
            return value
        old, looks = self.before.values[value], self.values[new]
        same = (old.stride, old.offset) == (looks.stride, looks.offset)
        if not same or not fills(looks, self.storages[looks.storage]):
            raise Refused("the caller would get a window on larger memory")
        return new

    def _on_copies(self, op: Op, new: Op) -> list[Op]:
        """Return the operator on dense copies of inputs that have become views."""
        found, copies = [], {}
        for old, value in zip(op.inputs(), new.inputs(), strict=True):
            looks, now = self.before.values[old], self.values[value]
            if looks.stride == now.stride or value in copies:
                continue
            if looks.stride != row_major(looks.shape):
                raise Refused(f"{op.target} would meet another layout")
            copies[value] = number = self._fresh.value
            storage = self._fresh.storage
            self._fresh.value, self._fresh.storage = number + 1, storage + 1
            self.values[number] = replace(
                now, id=number, stride=row_major(now.shape), storage=storage, offset=0, name="", bits=()
            )
            self.storages[storage] = Storage(storage, now.nbytes, "temporary")
            self._changed.add(number)
            found.append(
                Op(
                    self._fresh.op, "aten.clone.default", (Ref(value),),
                    (("memory_format", Const("memory_format", "contiguous_format")),), (number,),
                    reads=((now.storage, 0),), phase=op.phase, module=op.module, line=op.line,
                )
            )  # fmt: skip
            self._fresh.op += 1
        new = with_inputs(new, copies)
        if signature(op, self.before.values) != signature(new, self.values):
            raise Refused(f"{op.target} would meet another layout")
        return [*found, self._relocated(op, new)]

    def _relocated(self, op: Op, new: Op) -> Op:
        """Move the views that the operator returns, if all inputs keep their layout but lie on other storages."""
        for value in dict.fromkeys(new.made()):
            old = self.before.values[value]
            for taken, given in zip(op.inputs(), new.inputs(), strict=True):
                source, target = self.before.values[taken], self.values[given]
                if source.storage == old.storage:
                    if (source.storage, source.offset) != (target.storage, target.offset):
                        bytes_moved = (target.offset - source.offset) * ITEM_SIZE[source.dtype]
                        moved = old.offset + bytes_moved // ITEM_SIZE[old.dtype]
                        self.values[value] = replace(old, storage=target.storage, offset=moved)
                        self._changed.add(value)
                    break
        return self._with_new_versions(op, new)

    def _with_new_results(self, op: Op, new: Op, made: tuple[Made | None, ...]) -> Op:
        for value, each in zip(new.outputs, made, strict=True):
            if value is None or each is None:
                continue
            old = self.before.values[value]
            sources = [at for at, taken in enumerate(op.inputs()) if self.before.values[taken].storage == old.storage]
            same = (old.shape, old.dtype, old.bits) == (each.shape, each.dtype, each.bits)
            if bool(sources) != (each.base is not None) or not same:
                raise Refused(f"{op.target} would make another kind of tensor")
            if each.base is None:
                looks = replace(old, stride=each.stride, offset=each.offset)
                self.storages[old.storage] = replace(self.storages[old.storage], nbytes=each.nbytes)
            else:
                base = self.values[new.inputs()[each.base]]
                looks = replace(old, stride=each.stride, storage=base.storage, offset=each.offset_on(base))
            if looks != old:
                self.values[value] = looks
                self._changed.add(value)
        return self._with_new_versions(op, new)

    def _with_new_versions(self, op: Op, new: Op) -> Op:
        """Return the operator with the versions of the storages of its new inputs."""
        moved: dict[int, set[int]] = {}  # old storage -> new storages
        for old, value in zip(op.inputs(), new.inputs(), strict=True):
            left, storage = self.before.values[old].storage, self.values[value].storage
            if left != storage:
                moved.setdefault(left, set()).add(storage)
        if any(storage in moved for storage, _ in op.writes):
            raise Refused(f"{op.target} writes what would lie elsewhere")
        still = {self.values[value].storage for value in new.inputs()}
        reads = {pair for pair in op.reads if pair[0] not in moved or pair[0] in still}
        reads |= {(storage, version) for left, version in op.reads for storage in moved.get(left, ())}
        if len({storage for storage, _ in reads}) < len(reads):
            raise Refused(f"{op.target} would meet two versions of one storage")
        return replace(new, reads=tuple(sorted(reads)))


def _pruned(
    rows: list[tuple[int, Op]], outputs: tuple[int, ...], candidates: frozenset[int], before: Graph
) -> list[tuple[int, Op]]:
    """Drop candidates without users, and all operators that only they used."""
    needed = {op.id for op in before.ops} - candidates
    uses: dict[int, int] = dict.fromkeys(outputs, 1)
    maker = {value: op for _, op in rows for value in op.made()}
    for _, op in rows:
        for value in op.inputs():
            uses[value] = uses.get(value, 0) + 1
    dead: set[int] = set()
    waiting = [op for _, op in rows if op.id not in needed]
    while waiting:
        op = waiting.pop()
        if op.id in dead or op.writes or op.random or any(uses.get(value, 0) for value in op.made()):
            continue
        dead.add(op.id)
        for value in op.inputs():
            uses[value] -= 1
            if not uses[value] and value in maker:
                waiting.append(maker[value])
    return [(key, op) for key, op in rows if op.id not in dead]


def _ordered(
    before: Graph, rows: list[tuple[int, Op]], change: _Change, stretches: Sequence[tuple[int, int]]
) -> tuple[Op, ...]:
    """Return the operators in their given order if that is legal, else in the closest legal order.

    Only operators within a stretch, from an edit's first removed call to its last, may move. Raises Refused if an
    operator behind a stretch would not read its tensors and versions, as when a replacement is overwritten too early.
    """
    ops = [op for _, op in rows]
    met, found = _Progress(before), list[Op]()
    for first, last in stretches:
        low, high = (bisect.bisect(rows, key, key=lambda row: row[0]) for key in (2 * first - 1, 2 * last + 1))
        if not all(met.runs(op) for op in ops[len(found) : low]):
            raise Refused("what stands in front of the calls would meet something else")
        middle = ops[low:high]
        if not met.then(middle):  # sorted by their dependences, otherwise as they stand
            dag = dependency_graph(Graph(change.storages, change.values, tuple(middle), before.inputs, ()))
            if not rx.is_directed_acyclic_graph(dag):
                raise Refused("a call would need its own result")
            order = rx.lexicographical_topological_sort(dag, key=lambda node: f"{node:09d}")
            middle = [middle[node] for node in order]
        if not all(met.runs(op) for op in middle):
            raise Refused("no order meets the same versions")
        found += [*ops[len(found) : low], *middle]
    if not all(met.runs(op) for op in ops[len(found) :]):
        raise Refused("no order meets the same versions")
    return (*found, *ops[len(found) :])


class _Progress:
    """Values and storage versions that exist after some operators."""

    def __init__(self, graph: Graph) -> None:
        self.values = set(graph.inputs)
        self.versions: dict[int, int] = {}

    def runs(self, op: Op) -> bool:
        """Advance past an operator; return False if an input is missing or at another version than the operator
        reads."""
        if not self.values.issuperset(op.inputs()):
            return False
        if any(self.versions.get(storage, 0) != version for storage, version in op.reads):
            return False
        self.versions.update(op.writes)
        self.values.update(op.made())
        return True

    def then(self, ops: Sequence[Op]) -> bool:
        """Return True if all operators could run next, in order."""
        after = copy.copy(self)
        after.values, after.versions = set(self.values), dict(self.versions)
        return all(after.runs(op) for op in ops)
