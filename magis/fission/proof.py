"""Independent proof that loops are equivalent to unsplit operators: every loop is undone.

    for each part:  p = magis.part(x, 0);  q = relu(p @ w);  magis.join(y, q, 0)      ->      y = relu(x @ w)

The body is read at a part's size. ``magis.part`` relates its slice to the unsplit tensor; for each further operator, an
unsplit call is inferred of which it is a part, by split labels (``magis.ops.splits``; with a halo, a part does not
pad); joins and reductions must agree with the inferred relation. If several calls fit (a part [1, 4] of [2, 4] or of
[1, 8]), the one with shapes of the original step is tried first, if that is given. The proof uses neither the region of
a loop nor the code that made it. Nested loops are undone from the innermost on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count, islice, product
from typing import TypeAlias

from magis.errors import VerifyError
from magis.fission.global_calls import (
    GlobalCall,
    Literals,
    Placement,
    TensorLayout,
    global_calls,
    layout_of,
    part_shape,
    value_of,
    with_literals,
)
from magis.fission.last_part import resized
from magis.fission.part_sums import is_rounding, with_sums_apart
from magis.graph import Arg, Graph, Loop, Op, Ref, Value
from magis.graph.loop_rules import MERGES, merged_dtype, rows_around, scale
from magis.ops.plain_calls import commutes, plain_form
from magis.ops.splits import Halo, Overlap

Likely: TypeAlias = frozenset[tuple[tuple[int, ...], str]]
"""Shapes and dtypes of tensors in the original step."""

MOST_COMBINATIONS = 64
"""Limit on combinations of an operator's input facts that are tried: few inputs have more than one."""


def verify_fission(graph: Graph, original: Graph | None = None) -> None:
    """Raise VerifyError for the first loop that equals no unsplit operators; with ``original``, also if the steps
    differ.

    The original is the step before fission, whose values keep their ids. Steps are equal if they make equal outputs,
    and equal writes, by equal operators from equal inputs.
    """
    for op in graph.ops:
        for problem in loop_proof_problems(graph, op):
            raise VerifyError(problem)
    if original is None:
        return
    likely = frozenset((value.shape, value.dtype) for value in original.values.values())
    (results, writes), (expected, wrote) = _digests(graph, likely), _digests(original, likely)
    for value, found, known in zip(original.outputs, results, expected, strict=True):
        if found != known:
            raise VerifyError(f"the step computes its result {value} otherwise than the original")
    if writes != wrote:
        raise VerifyError("the step writes other contents than the original")


def loop_proof_problems(graph: Graph, op: Op) -> Iterator[str]:
    """Yield the errors of an operator's loop as lines; none for other operators."""
    if op.body is not None:
        yield from (problems := _Undoing(graph.values, op, op.body).problems)
        if not problems and scale(op.body) != op.body.parts:
            try:
                whole_calls(op, dict(graph.values))
            except VerifyError as error:
                yield str(error)


def _undo_loops(graph: Graph, likely: Likely = frozenset()) -> tuple[list[Op], dict[int, Value]]:
    """Return the graph's operators with loops undone, and all values by id, existing ones included."""
    ops: list[Op] = []
    values = dict(graph.values)
    for op in graph.ops:
        ops += [op] if op.body is None else whole_calls(op, values, likely)
    return ops, values


def whole_calls(op: Op, values: dict[int, Value], likely: Likely = frozenset()) -> list[Op]:
    """Return the unsplit calls that a loop's parts make up, then a ``magis.alias`` for each output.

    Values of these calls are added to ``values``. Raises VerifyError if there are no such calls.
    """
    if op.body is None:
        raise VerifyError("no loop")
    last, outside = last_part(op, values), dict(values)
    calls = _Emitting(_undone(values, op, op.body, likely), values).everything()
    if last is not None:
        smaller = _undone(outside, op, Loop(op.body.parts, last), likely, of=op.body)
        if _Emitting(smaller, outside).everything() != calls:
            raise VerifyError(f"{smaller.where}: its last part is one of other calls")
    return calls


def last_part(op: Op, values: Mapping[int, Value]) -> Graph | None:
    """Return the body of a loop's last part if that is smaller than the others, else None.

    ``values``: those around the loop. Raises VerifyError where no operator makes a part of that size.
    """
    if op.body is None or scale(op.body) == op.body.parts:
        return None
    emitting = _Emitting(_undone(values, op, op.body), dict(values))
    emitting.everything()
    cut: dict[int, Literals] = {}
    for source, literals in emitting.literals.items():
        small = emitting.undoing.ops[source.at]
        if cut.setdefault(small.id, literals) != literals:
            raise VerifyError(f"{emitting.undoing.where}: operator {small.id} is a part of several calls")
    return resized(op.body.graph, scale(op.body) - (op.body.parts - 1), cut)


def _undone(
    values: Mapping[int, Value], op: Op, loop: Loop, likely: Likely = frozenset(), of: Loop | None = None
) -> _Undoing:
    undoing = _Undoing(values, op, loop, likely, of)
    for problem in undoing.problems:
        raise VerifyError(problem)
    return undoing


def _functional(graph: Graph) -> Graph:
    """Return a graph whose operators on temporary memory are functional ones, where no value is read after its memory
    was written: then it does not matter where results lie."""
    stale = set(_stale_reads(graph))
    ops: list[Op] = []
    for op in graph.ops:
        plain, over = plain_form(op)
        storage = None if over is None else graph.storages[graph.values[over].storage]
        own = storage is not None and storage.kind == "temporary" and storage.id not in stale
        ops.append(replace(plain, writes=()) if own else op)
    return replace(graph, ops=tuple(ops))


def _stale_reads(graph: Graph) -> Iterator[int]:
    """Yield storages on which a value is taken, or returned, whose memory was written after the value was made."""
    writes: Counter[int] = Counter()
    opened: dict[int, int] = {}
    """Value -> number of writes to its storage before it was made."""
    for op in graph.ops:
        for value in op.inputs()[op.target in MERGES :]:
            storage = graph.values[value].storage
            if writes[storage] != opened.get(value, 0):
                yield storage
        writes.update(storage for storage, _ in op.writes)
        opened |= {value: writes[graph.values[value].storage] for value in op.made()}
    for value in graph.outputs:
        storage = graph.values[value].storage
        if writes[storage] != opened.get(value, 0):
            yield storage


def _in_parts(likely: Likely, parts: Fraction) -> Likely:
    """Return likely shapes, and those of their slices in a loop of so many parts, which inner loops work on."""
    return likely | {
        ((*shape[:dim], size // parts, *shape[dim + 1 :]), dtype)
        for shape, dtype in likely
        for dim, size in enumerate(shape)
        if size % parts == 0
    }


@dataclass(frozen=True, slots=True)
class _Source:
    """Origin of a fact: position of the operator, facts of its inputs, and index of the unsplit call."""

    at: int
    inputs: tuple[Placement, ...]
    way: int


@dataclass(frozen=True, slots=True)
class _Alias:
    """Origin of a fact that a value inherits from another value."""

    value: int
    fact: Placement


class _Undoing:
    """A loop to undo, with the facts (Placements) known of its body's values."""

    def __init__(
        self, outside: Mapping[int, Value], op: Op, loop: Loop, likely: Likely = frozenset(), of: Loop | None = None
    ) -> None:
        """``of``: the loop of which ``loop`` is the last, smaller part."""
        self.likely = likely
        self.parts = scale(loop)
        if of is not None:
            self.parts = scale(of) / (scale(of) - (of.parts - 1))
        self.rows = tuple(sorted({rows_around(each)[0] for each in loop.graph.ops} - {0}))
        self.where = f"operator {op.id} ({op.target})"
        self.facts: dict[int, dict[Placement, _Source | _Alias | None]] = {}
        self.results: dict[int, tuple[int, Placement]] = {}
        """Output of the loop -> value of the body that is its part, and the fact that proves it."""
        self.added: list[tuple[int, Placement]] = []
        """The same of sums that the loop adds to a tensor of the loop around it."""
        self.given: dict[int, int] = {}
        """Input of the body -> outer value."""
        self.sums: dict[int, str] = {}
        """Float32 accumulator of an inner loop -> dtype of the sum."""
        self.problems = [
            f"{self.where}: {problem}" for each in loop.graph.ops for problem in loop_proof_problems(loop.graph, each)
        ]
        if self.problems:
            return  # an unsound inner loop gives no facts
        body = _functional(with_sums_apart(loop.graph))
        self.ops, self.values = _undo_loops(body, _in_parts(likely, self.parts))
        taken = len(op.inputs())
        self.given = dict(zip(loop.graph.inputs[:taken], op.inputs(), strict=True))
        self.wholes = dict(zip(loop.graph.inputs[taken:], op.made(), strict=True))
        for inside, value in self.given.items():
            self.facts[inside] = {Placement("same", layout_of(outside[value])): None}
        for at, each in enumerate(self.ops):
            self._see(at, each)
        if not self.problems:
            missing = [value for value in op.made() if value not in self.results]
            self.problems += [f"{self.where}: value {value} is made of no parts" for value in missing]

    def ways(self, op: Op, facts: tuple[Placement, ...]) -> list[tuple[int, GlobalCall]]:
        """Return (index, unsplit call) for each call of which the operator may be a part, likely shapes first."""
        every = global_calls(op, self.values, facts, self.parts, self.rows)
        found = [(number, way) for number, way in enumerate(every) if self._agrees(op, way)]
        looks = {way: [(fact.whole[0], fact.whole[2]) for fact in way.outputs if fact is not None] for _, way in found}
        return sorted(found, key=lambda each: sum(look not in self.likely for look in looks[each[1]]))

    def known(self, op: Op) -> Iterator[tuple[Placement, ...]]:
        """Yield the combinations of facts of the operator's inputs."""
        return islice(product(*(self.facts[value] for value in op.inputs())), MOST_COMBINATIONS)

    def _see(self, at: int, op: Op) -> None:
        match op.target, op.args:
            case "magis.part", (Ref(whole), int(dim)):
                self._part(op, whole, dim)
            case "magis.part", (Ref(whole), int(dim), int(before), int(after)):
                self._part(op, whole, Halo(dim, before, after))
            case "magis.join" | "magis.reduce", (Ref(whole), Ref(part), int() | str() as how):
                self._merge(op, whole, part, how)
            case "magis.join", (Ref(whole), Ref(part), int(dim), int(before), int(after)):
                self._merge(op, whole, part, Overlap(dim, before, after))
            case (("magis.store" | "magis.load" | "magis.alias"), (Ref(value),)):
                for made in op.made():
                    self.facts[made] = {fact: _Alias(value, fact) for fact in self.facts.get(value, ())}
                    if value in self.sums:
                        self.sums[made] = self.sums[value]
                    elif self.values[made].dtype != self.values[value].dtype:
                        self.sums[made] = self.values[value].dtype
            case _, (Ref(value),) if is_rounding(op, self.sums.get(value, "")):
                self.facts[op.made()[0]] = {fact: _Alias(value, fact) for fact in self.facts[value]}
            case (("magis.wait" | "magis.arrived"), _):
                pass
            case _:
                self._operator(at, op)

    def _problem(self, op: Op, text: str) -> None:
        self.problems.append(f"{self.where}, operator {op.id} ({op.target}): {text}")

    def _part(self, op: Op, whole: int, cut: int | Halo) -> None:
        """Record a slice of a tensor that every part has whole."""
        known = [fact for fact in self.facts.get(whole, ()) if fact.how == "same" and whole not in self.sums]
        if not known:
            self._problem(op, f"takes a stretch of value {whole}, which is no whole tensor")
        for value in op.made():
            self.facts[value] = {Placement(cut, fact.whole): _Alias(whole, fact) for fact in known}

    def _merge(self, op: Op, whole: int, part: int, how: int | str | Overlap) -> None:
        """Record an output of the loop that is merged from its parts."""
        if whole not in self.wholes:  # of the loop around, whose proof compares it; or the rules of loops report it
            self.added += [(part, fact) for fact in self.facts.get(part, ()) if fact.how == how][:1]
        if part not in self.facts or whole not in self.wholes:
            return  # reported where it is made
        looks = self.values[whole]
        for fact in self.facts[part]:
            if fact.how == how and (fact.whole[0], merged_dtype(fact.whole[2], how)) == (looks.shape, looks.dtype):
                self.results[self.wholes[whole]] = part, fact
                return
        known = " or ".join(sorted({_words(fact.how) for fact in self.facts[part]}))
        self._problem(op, f"takes value {part} for {_words(how)} of {looks.dtype}{looks.shape}, but it is {known}")

    def _operator(self, at: int, op: Op) -> None:
        """Record which unsplit tensors the outputs of an operator are parts of."""
        taken = dict.fromkeys(op.inputs())
        if not self.sums.keys().isdisjoint(taken):
            self._problem(op, "takes a float32 sum of an inner loop, which is to be rounded first")
            return
        if any(value not in self.facts for value in taken):
            return  # reported where the input is made
        found: dict[int, dict[Placement, _Source | _Alias | None]] = {value: {} for value in op.made()}
        proven = False
        for facts in self.known(op) if not op.random and not op.target.startswith("magis.") else ():
            for number, way in self.ways(op, facts):
                proven = True
                for value, fact in zip(op.outputs, way.outputs, strict=True):
                    if value is not None and fact is not None:
                        found[value].setdefault(fact, _Source(at, facts, number))
        if proven:
            self.facts.update(found)
            return
        given = [f"%{value} {' or '.join(sorted({_words(f.how) for f in self.facts[value]}))}" for value in taken]
        self._problem(op, f"is a part of no whole call with {', '.join(given) or 'these sizes'}")

    def _agrees(self, op: Op, way: GlobalCall) -> bool:
        """Return True if parts of the unsplit call's outputs have the shapes and dtypes of the operator's outputs."""
        if len(op.outputs) != len(way.outputs):
            return False
        for value, fact in zip(op.outputs, way.outputs, strict=True):
            if value is None or fact is None:
                if value is not None or fact is not None:
                    return False
            elif (self.values[value].shape, self.values[value].dtype) != (part_shape(fact, self.parts), fact.whole[2]):
                return False
        return True


@dataclass
class _Emitting:
    """Emitter of the unsplit calls that make a loop's outputs, each once, in topological order."""

    undoing: _Undoing
    values: dict[int, Value]
    ops: list[Op] = field(default_factory=list)
    emitted: dict[_Source, tuple[int | None, ...]] = field(default_factory=dict)
    literals: dict[_Source, Literals] = field(default_factory=dict)
    """Size literals of an operator of the body that are others in the unsplit call, with their values in the body."""

    def everything(self) -> list[Op]:
        """Emit and return the unsplit calls that write memory or make the loop's outputs, which keep their outer
        ids."""
        for at, op in enumerate(self.undoing.ops):
            if op.writes and op.target not in MERGES:
                facts, (number, _) = next((f, way) for f in self.undoing.known(op) for way in self.undoing.ways(op, f))
                self._emit_call(op, _Source(at, facts, number))
        for part, fact in self.undoing.added:
            self._need(part, fact)
        for value, (part, fact) in self.undoing.results.items():
            self.ops.append(Op(len(self.ops), "magis.alias", (Ref(self._need(part, fact)),), (), (value,)))
        return self.ops

    def _need(self, value: int, fact: Placement) -> int:
        """Emit the unsplit tensor of which a value of the body is a part; return its id."""
        source = self.undoing.facts[value][fact]
        if not isinstance(source, _Source):
            return self.undoing.given[value] if source is None else self._need(source.value, source.fact)
        op = self.undoing.ops[source.at]
        made = self._emit_call(op, source)[op.outputs.index(value)]
        return -1 if made is None else made  # never: it has a fact

    def _emit_call(self, op: Op, source: _Source) -> tuple[int | None, ...]:
        if source not in self.emitted:
            inputs = [self._need(value, fact) for value, fact in zip(op.inputs(), source.inputs, strict=True)]
            undoing = self.undoing
            every = global_calls(op, undoing.values, source.inputs, undoing.parts, undoing.rows)
            way = every[source.way]
            outputs = tuple(None if fact is None else self._fresh(fact.whole) for fact in way.outputs)
            self.emitted[source] = outputs
            self.literals[source] = tuple((path, int(size / undoing.parts)) for path, size in way.literals)
            self.ops.append(with_literals(op, way.literals, inputs, outputs))
        return self.emitted[source]

    def _fresh(self, looks: TensorLayout) -> int:
        key = next(key for key in count(len(self.values)) if key not in self.values)
        self.values[key] = value_of(key, looks)
        return key


def _words(how: int | str | Halo | Overlap) -> str:
    if isinstance(how, Halo | Overlap):
        kind = "cut" if isinstance(how, Halo) else "rows that overlap"
        return f"{kind} along {how.dim} with {how.before} rows before and {how.after} behind"
    return f"cut along {how}" if isinstance(how, int) else "whole" if how == "same" else f"a part of a {how}"


# -- whole steps -------------------------------------------------------------------------------------------------


def _digests(graph: Graph, likely: Likely) -> tuple[list[str], list[str]]:
    """Return digests of how each output, and each write, is computed from the inputs, independent of ids and order."""
    ops, values = _undo_loops(_functional(graph), likely)
    known = {value: f"input {value}" for value in graph.inputs}
    writes: list[str] = []
    exact: dict[int, tuple[str, str]] = {}
    """Float32 accumulator of a sum -> digest and dtype of the sum in half precision."""
    for op in ops:
        if op.target == "magis.alias":
            (value,), (whole,) = op.made(), op.inputs()
            known[value] = known[whole]
            if values[value].dtype != values[whole].dtype:
                exact[value], known[value] = (known[whole], values[whole].dtype), f"float32 {known[whole]}"
            continue
        digest, dtype = exact.get(next(iter(op.inputs()), -1), ("", ""))
        if is_rounding(op, dtype):
            known[op.made()[0]] = digest
            continue
        plain, _ = plain_form(op)  # several variants may share one in-place variant
        if plain.inputs() != op.inputs():
            plain = op
        given = [known[value] for value in plain.inputs()]
        inputs = iter(sorted(given) if commutes(plain, values) else given)
        text = f"{plain.target} {_plain(plain.args, inputs)} "
        text += str([(key, _plain(arg, inputs)) for key, arg in plain.kwargs])
        digest = hashlib.sha256(text.encode()).hexdigest()
        known |= {value: f"{digest} {at}" for at, value in enumerate(op.outputs) if value is not None}
        if op.writes:
            writes.append(digest)
    return [known[value] for value in graph.outputs], sorted(writes)


def _plain(arg: Arg, inputs: Iterator[str]) -> str:
    if isinstance(arg, tuple):
        return f"[{', '.join(_plain(item, inputs) for item in arg)}]"
    return next(inputs) if isinstance(arg, Ref) else repr(arg)
