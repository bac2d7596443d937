"""Matching of patterns in a graph.

Only calls that can be replaced safely are matched: functional, deterministic, no loop, with outputs that nothing writes
and the step does not return. Their inputs may be any tensors, weights included.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from magis.graph import Graph, Op
from magis.rewrite.rules.language import CallPattern, Each, Pattern, Var, is_family, member
from magis.rewrite.rules.merged_weights import is_weight
from magis.rewrite.rules.operator_forms import BRINGS_LITERALS, FORMS, Seen, sizes_of_split


@dataclass(frozen=True)
class Bound:
    """A match: the tensors, lists and literals bound to a pattern's names.

    ``roots`` are the values that the rule replaces, in order; ``ops`` the ids of the matched calls; ``like`` the calls
    whose literals the new calls keep, by operator of the pattern language.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    lists: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    like: Mapping[str, Op] = field(default_factory=dict)
    keys: Mapping[str, Hashable] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()
    roots: tuple[int, ...] = ()


class Index:
    """A graph with lookup tables for matching."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.maker: dict[int, Op] = {value: op for op in graph.ops for value in op.made()}
        self.users: dict[int, list[Op]] = {}
        for op in graph.ops:
            for value in dict.fromkeys(op.inputs()):
                self.users.setdefault(value, []).append(op)
        self.position = {op.id: position for position, op in enumerate(graph.ops)}
        self._written = {storage for op in graph.ops for storage, _ in op.writes}
        self._returned = {graph.values[value].storage for value in graph.outputs}
        self._seen: dict[tuple[str, int], Seen | None] = {}
        self._match_args: dict[str, list[tuple[Op, Seen]]] = {}
        self._part = {op.id: op for op in graph.ops if self.takes_part(op)}
        self.in_cat: dict[int, tuple[int, int]] = {}
        for op, seen in self.all("cat"):
            for number, value in enumerate(seen.args):
                self.in_cat.setdefault(value, (self.position[op.id], number))

    def see(self, form: str, op: Op) -> Seen | None:
        """Return a call as an operator of the pattern language; None if it does not match or must not be replaced."""
        where = (form, op.id)
        if where not in self._seen:
            self._seen[where] = FORMS[form](op, self.graph.values) if op.id in self._part else None
        return self._seen[where]

    def all(self, form: str) -> Sequence[tuple[Op, Seen]]:
        """Return every call that matches an operator of the pattern language, in program order."""
        if form not in self._match_args:
            seen = ((op, self.see(form, op)) for op in self._part.values())
            self._match_args[form] = [(op, found) for op, found in seen if found is not None]
        return self._match_args[form]

    def takes_part(self, op: Op) -> bool:
        if op.body is not None or op.random or op.writes or op.phase == "update" or not op.made():
            return False
        return op.target.startswith("aten.") and all(self.replaceable(value) for value in op.made())

    def replaceable(self, value: int) -> bool:
        """Return True if nothing writes the memory of a value and the step does not return it.

        Views of persistent memory, such as a transposed weight, are replaceable: the update writes their storage, but
        versions order it.
        """
        storage = self.graph.storages[self.graph.values[value].storage]
        if storage.kind not in ("temporary", *_KEPT) or storage.id in self._returned:
            return False
        return storage.kind != "temporary" or storage.id not in self._written


_KEPT = ("parameter", "buffer", "batch", "constant")
_BESIDE = frozenset({"l", "r"})
"""Names of lists that may be empty: tensors left and right of a nested concatenation."""


def occurrences(index: Index, pattern: Pattern) -> Iterator[Bound]:
    """Yield every match of the pattern, by the position of the outermost call."""
    if not isinstance(pattern, CallPattern):
        return
    if not is_family(pattern):
        for op, _ in index.all(pattern.form):
            for bound in _match_call(index, pattern, op, Bound()):
                yield replace(bound, roots=op.made())
    elif any(isinstance(arg, Each) and isinstance(arg.of, CallPattern) for arg in pattern.args):
        yield from _match_on_pieces(index, pattern)
    else:
        yield from _match_siblings(index, pattern)


# -- one call ---------------------------------------------------------------------------------------------------------


def _match_value(index: Index, pattern: Pattern, value: int, bound: Bound) -> Iterator[Bound]:
    if isinstance(pattern, Var):
        known = bound.values.get(pattern.name, value)
        if known == value:
            yield replace(bound, values={**bound.values, pattern.name: value})
    elif isinstance(pattern, CallPattern) and value in index.maker:
        op = index.maker[value]
        if len(op.outputs) == 1 and not op.many:
            yield from _match_call(index, pattern, op, bound)


def _match_call(index: Index, pattern: CallPattern, op: Op, bound: Bound) -> Iterator[Bound]:
    seen = index.see(pattern.form, op)
    if seen is None:
        return
    # The call's dimension and literals are bound, or equal to those bound before.
    dims, like, keys = dict(bound.dims), dict(bound.like), dict(bound.keys)
    if isinstance(pattern.dim, str):
        if dims.setdefault(pattern.dim, seen.dim or 0) != seen.dim:
            return
    elif pattern.dim != seen.dim:
        return
    if pattern.form in BRINGS_LITERALS:
        if keys.setdefault(pattern.form, seen.key) != seen.key:
            return
        like.setdefault(pattern.form, op)
    started = replace(bound, dims=dims, like=like, keys=keys, ops=(*bound.ops, op.id))
    if pattern.form == "cat":
        yield from _match_list(index, pattern.args, seen.args, started)
    elif pattern.form == "split":
        sizes = sizes_of_split(op, index.graph.values)
        for found in _match_value(index, pattern.args[0], seen.args[0], replace(started, sizes=sizes)):
            if _pieces_fit(index, pattern, found, sizes, seen.dim):
                yield found
    else:
        yield from _match_args(index, pattern.args, seen.args, started)


def _match_args(index: Index, patterns: Sequence[Pattern], values: Sequence[int], bound: Bound) -> Iterator[Bound]:
    if len(patterns) != len(values):
        return
    if not patterns:
        yield bound
        return
    for found in _match_value(index, patterns[0], values[0], bound):
        yield from _match_args(index, patterns[1:], values[1:], found)


def _pieces_fit(index: Index, pattern: CallPattern, bound: Bound, sizes: tuple[int, ...], dim: int | None) -> bool:
    """Return False if the pattern names a list whose members differ in size from the pieces."""
    for arg in pattern.args[1:]:
        if isinstance(arg, Each) and isinstance(arg.of, Var) and dim is not None:
            wanted = tuple(index.graph.values[v].shape[dim] for v in bound.lists.get(arg.of.name, ()))
            if wanted != sizes:
                return False
    return True


# -- lists ------------------------------------------------------------------------------------------------------------


def _match_list(index: Index, patterns: Sequence[Pattern], values: Sequence[int], bound: Bound) -> Iterator[Bound]:
    """Match the members of a concatenation: tensors, lists, families, or the pieces of a split."""
    if not patterns:
        if not values:
            yield bound
        return
    first, rest = patterns[0], patterns[1:]
    if isinstance(first, Each) and isinstance(first.of, CallPattern):
        # All pieces of one split, in order.
        op = index.maker.get(values[0]) if values and not rest else None
        if op is not None and op.outputs == tuple(values):
            yield from _match_call(index, first.of, op, bound)
    elif is_family(first):
        yield from _match_members(index, first, values, bound) if not rest else ()
    elif isinstance(first, Each) and isinstance(first.of, Var):
        # A single list takes all members; of several, those left and right may be empty, one between has two or more.
        least = len(values) if not rest else 0 if first.of.name in _BESIDE else 2
        for count in range(least, len(values) + 1):
            found = replace(bound, lists={**bound.lists, first.of.name: tuple(values[:count])})
            yield from _match_list(index, rest, values[count:], found)
    elif values:
        for found in _match_value(index, first, values[0], bound):
            yield from _match_list(index, rest, values[1:], found)


def _match_members(
    index: Index, pattern: Pattern, values: Sequence[int], bound: Bound, number: int = 0
) -> Iterator[Bound]:
    """Match every value with the pattern, binding the starred names anew for each."""
    if number == len(values):  # ``a.0``, ``a.1``, ... become the list ``a``
        names = dict.fromkeys(name.partition(".")[0] for name in bound.values if "." in name)
        lists = {name: tuple(bound.values[f"{name}.{at}"] for at in range(number)) for name in names}
        single = {name: value for name, value in bound.values.items() if "." not in name}
        yield replace(bound, values=single, lists={**bound.lists, **lists})
        return
    for found in _match_value(index, member(pattern, number), values[number], bound):
        yield from _match_members(index, pattern, values, found, number + 1)


# -- families ---------------------------------------------------------------------------------------------------------


def _match_siblings(index: Index, pattern: CallPattern) -> Iterator[Bound]:
    """Yield matches of calls that share all but the starred tensors: the whole group, and each pair of neighbours."""
    fixed = [at for at, arg in enumerate(pattern.args) if not isinstance(arg, Each)]
    groups: dict[Hashable, list[tuple[Op, Seen]]] = {}
    for op, seen in index.all(pattern.form):
        if len(seen.args) != len(pattern.args):
            continue
        looks = tuple(
            (
                index.graph.values[value].dtype,
                len(index.graph.values[value].shape),
                _is_weight(index, value),
            )
            for value in seen.args
        )
        groups.setdefault((seen.key, tuple(seen.args[at] for at in fixed), looks, op.phase), []).append((op, seen))
    for group in groups.values():
        members = sorted(group, key=lambda item: (_place_key(index, pattern, item[1]), index.position[item[0].id]))
        if len(members) > 1:
            yield _family(pattern, members)
        if len(members) > 2:
            yield from (_family(pattern, members[at : at + 2]) for at in range(len(members) - 1))


def _is_weight(index: Index, value: int) -> bool:
    return is_weight(index.graph.storages, index.graph.values[value])


def _place_key(index: Index, pattern: CallPattern, seen: Seen) -> tuple[tuple[int, int], ...]:
    """Return the sort key of siblings: weights by address, so that forward and backward want one order; other tensors
    by their position, or their transpose's, in an existing concatenation, which can then be shared."""
    found = []
    for arg, value in zip(pattern.args, seen.args, strict=True):
        if not isinstance(arg, Each):
            continue
        looks = index.graph.values[value]
        turned = index.see("t", index.maker[value]) if value in index.maker else None
        source = value if turned is None else turned.args[0]
        found.append((looks.storage, looks.offset) if _is_weight(index, value) else index.in_cat.get(source, (-1, -1)))
    return tuple(found)


def _family(pattern: CallPattern, members: Sequence[tuple[Op, Seen]]) -> Bound:
    values: dict[str, int] = {}
    lists: dict[str, tuple[int, ...]] = {}
    for at, arg in enumerate(pattern.args):
        if isinstance(arg, Var):
            values[arg.name] = members[0][1].args[at]
        elif isinstance(arg, Each) and isinstance(arg.of, Var):
            lists[arg.of.name] = tuple(seen.args[at] for _, seen in members)
    first = members[0][0]
    return Bound(
        values, lists, like={pattern.form: first}, ops=tuple(op.id for op, _ in members),
        roots=tuple(op.made()[0] for op, _ in members),
    )  # fmt: skip


def _match_on_pieces(index: Index, pattern: CallPattern) -> Iterator[Bound]:
    """Yield matches of equal calls on all pieces of a split; for two tensors, on corresponding pieces of two splits."""
    split = next(arg.of for arg in pattern.args if isinstance(arg, Each) and isinstance(arg.of, CallPattern))
    for op, _ in index.all(split.form):
        for first in index.users.get(op.made()[0], ()):
            seen = index.see(pattern.form, first)
            if seen is None or seen.args[0] != op.made()[0]:
                continue
            splits = [index.maker.get(value) for value in seen.args]
            calls = [_twin(index, pattern.form, seen, splits, number) for number in range(len(op.made()))]
            members = [call for call in calls if call is not None]
            if len(members) != len(op.made()) or len(splits) != len(pattern.args):
                continue
            bound: Bound | None = Bound(like={pattern.form: first}, ops=tuple(each.id for each in members))
            for arg, each in zip(pattern.args, splits, strict=True):
                if bound is not None and each is not None and isinstance(arg, Each) and isinstance(arg.of, CallPattern):
                    bound = next(_match_call(index, arg.of, each, bound), None)
            if bound is not None:
                yield replace(bound, roots=tuple(each.made()[0] for each in members))


def _twin(index: Index, form: str, seen: Seen, splits: Sequence[Op | None], number: int) -> Op | None:
    """Return the call on piece ``number`` of each split that equals ``seen`` on the first pieces; None without one."""
    if any(split is None or number >= len(split.outputs) for split in splits):
        return None
    wanted = tuple(split.outputs[number] for split in splits if split is not None)
    for op in index.users.get(wanted[0] if wanted[0] is not None else -1, ()):
        found = index.see(form, op)
        if found is not None and found.args == wanted and found.key == seen.key:
            return op
    return None
