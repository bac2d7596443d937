"""An independent check that loops compute what whole operators would: every loop is undone.

    for each part:  p = magis.part(x, 0);  q = relu(p @ w);  magis.join(y, q, 0)      ->      y = relu(x @ w)

The body is read at the size of a part. ``magis.part`` says how its stretch relates to the whole tensor; for each
further operator a call at the size of the whole is sought whose labels (``magis.aten.splits``) say that this one is a
part of it; joins and reductions must fit what that says of their parts. Neither the region that a loop was made of nor
the code that made it is looked at. Loops within loops are undone from the innermost on.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, product
from typing import TypeAlias

from magis.aten.splits import Path, splits
from magis.cost.shapes import describe
from magis.cost.signature import parse, signature
from magis.errors import VerifyError
from magis.ir import Arg, Graph, Loop, Op, Ref, Value
from magis.ir.loops import JOIN, REDUCE

MOST_LITERALS = 2
"""Size literals of one call that stand for the same axis: sizes of a bias and groups, groups and channels."""
MOST_COMBINATIONS = 64
"""Of what may be said of the inputs of one operator: few have more than one reading."""

Looks: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], str]
"""Shape, strides and data type of a whole tensor."""


@dataclass(frozen=True, slots=True)
class Fact:
    """How a value of the body makes up a whole tensor: the dimension along which the parts lie side by side, "same"
    where each part has all of it, or how parts combine (``COMBINATIONS``)."""

    how: int | str
    whole: Looks


@dataclass(frozen=True, slots=True)
class _Way:
    """A whole call that an operator is a part of: where its literals are larger, and what its results look like."""

    literals: tuple[Path, ...]
    outputs: tuple[Fact | None, ...]


def verify_fission(graph: Graph, original: Graph | None = None) -> None:
    """Raise VerifyError for the first loop that computes no whole; with ``original``, also if the step is another one.

    The original is the step before fission: values that exist in both have the same ids. Equal steps make the same
    results, and the same writes, by the same operators from the same inputs.
    """
    for op in graph.ops:
        for problem in loop_proof_problems(graph, op):
            raise VerifyError(problem)
    if original is None:
        return
    (results, writes), (expected, wrote) = _digests(graph), _digests(original)
    for value, found, known in zip(original.outputs, results, expected, strict=True):
        if found != known:
            raise VerifyError(f"the step computes its result {value} otherwise than the original")
    if writes != wrote:
        raise VerifyError("the step writes other contents than the original")


def loop_proof_problems(graph: Graph, op: Op) -> Iterator[str]:
    """Why the operator's loop computes no whole, one line per place; nothing for sound loops and other operators."""
    if op.body is not None:
        yield from _Undoing(graph.values, op, op.body).problems


def _whole(graph: Graph) -> tuple[list[Op], dict[int, Value]]:
    """The graph's operators with loops undone; ids of values are kept, further ones are fresh."""
    ops: list[Op] = []
    values = dict(graph.values)
    for op in graph.ops:
        ops += [op] if op.body is None else _Emitting(_Undoing(values, op, op.body), values).everything()
    return ops, values


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a fact is from: position of the operator, the facts of its inputs, and which of the ways."""

    at: int
    inputs: tuple[Fact, ...]
    way: int


@dataclass(frozen=True, slots=True)
class _Alias:
    """A fact of a value that says the same of the whole of another one."""

    value: int
    fact: Fact


class _Undoing:
    """One loop while it is being undone: what is known of the values of its body."""

    def __init__(self, outside: Mapping[int, Value], op: Op, loop: Loop) -> None:
        self.parts = loop.parts
        self.where = f"operator {op.id} ({op.target})"
        self.facts: dict[int, dict[Fact, _Source | _Alias | None]] = {}
        self.results: dict[int, tuple[int, Fact]] = {}
        """Value outside that the loop makes -> the value of the body that is its part, and how."""
        self.given: dict[int, int] = {}
        """Input of the body -> value outside."""
        self.problems = [
            f"{self.where}: {problem}" for each in loop.graph.ops for problem in loop_proof_problems(loop.graph, each)
        ]
        if self.problems:
            return  # nothing can be said of what an unsound loop makes
        self.ops, self.values = _whole(loop.graph)
        count = len(op.inputs())
        self.given = dict(zip(loop.graph.inputs[:count], op.inputs(), strict=True))
        self.wholes = dict(zip(loop.graph.inputs[count:], op.made(), strict=True))
        for inside, value in self.given.items():
            self.facts[inside] = {Fact("same", _looks(outside[value])): None}
        for at, each in enumerate(self.ops):
            self._see(at, each)
        if not self.problems:
            missing = [value for value in op.made() if value not in self.results]
            self.problems += [f"{self.where}: value {value} is made of no parts" for value in missing]

    def ways(self, op: Op, facts: tuple[Fact, ...]) -> list[tuple[int, _Way]]:
        """The whole calls, numbered, whose parts make what the operator makes."""
        every = _ways(signature(op, self.values), facts, self.parts)
        return [(number, way) for number, way in enumerate(every) if self._agrees(op, way)]

    def known(self, op: Op) -> Iterator[tuple[Fact, ...]]:
        """What is known of the operator's inputs, in every combination."""
        return islice(product(*(self.facts[value] for value in op.inputs())), MOST_COMBINATIONS)

    def _see(self, at: int, op: Op) -> None:
        match op.target, op.args:
            case "magis.part", (Ref(whole), int(dim)):
                self._part(op, whole, dim)
            case "magis.join" | "magis.reduce", (Ref(whole), Ref(part), int() | str() as how):
                self._merge(op, whole, part, how)
            case (("magis.store" | "magis.load" | "magis.alias"), (Ref(value),)):
                for made in op.made():
                    self.facts[made] = {fact: _Alias(value, fact) for fact in self.facts.get(value, ())}
            case "magis.wait", _:
                pass
            case _:
                self._operator(at, op)

    def _problem(self, op: Op, text: str) -> None:
        self.problems.append(f"{self.where}, operator {op.id} ({op.target}): {text}")

    def _part(self, op: Op, whole: int, dim: int) -> None:
        """A stretch of what every part has all of."""
        known = [fact for fact in self.facts.get(whole, ()) if fact.how == "same"]
        if not known:
            self._problem(op, f"takes a stretch of value {whole}, which is no whole tensor")
        for value in op.made():
            self.facts[value] = {Fact(dim, fact.whole): _Alias(whole, fact) for fact in known}

    def _merge(self, op: Op, whole: int, part: int, how: int | str) -> None:
        """A result made of its parts the way that they make it up."""
        if part not in self.facts or whole not in self.wholes:
            return  # said where it is made; or no result of this loop, which the rules of loops say
        looks = self.values[whole]
        for fact in self.facts[part]:
            if fact.how == how and (fact.whole[0], fact.whole[2]) == (looks.shape, looks.dtype):
                self.results[self.wholes[whole]] = part, fact
                return
        known = " or ".join(sorted({_words(fact.how) for fact in self.facts[part]}))
        self._problem(op, f"takes value {part} for {_words(how)} of {looks.dtype}{looks.shape}, but it is {known}")

    def _operator(self, at: int, op: Op) -> None:
        """An operator as part of a whole one."""
        taken = dict.fromkeys(op.inputs())
        if any(value not in self.facts for value in taken):
            return  # said where the input is made
        found: dict[int, dict[Fact, _Source | _Alias | None]] = {value: {} for value in op.made()}
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

    def _agrees(self, op: Op, way: _Way) -> bool:
        """Whether the parts of what the whole call makes look as the operator's results do."""
        if len(op.outputs) != len(way.outputs):
            return False
        for value, fact in zip(op.outputs, way.outputs, strict=True):
            if value is None or fact is None:
                if value is not None or fact is not None:
                    return False
            elif (self.values[value].shape, self.values[value].dtype) != (_part_shape(fact, self.parts), fact.whole[2]):
                return False
        return True


@dataclass
class _Emitting:
    """The whole calls that make a loop's results, each once, behind those that it needs; ``values`` takes up theirs."""

    undoing: _Undoing
    values: dict[int, Value]
    ops: list[Op] = field(default_factory=list)
    emitted: dict[_Source, tuple[int | None, ...]] = field(default_factory=dict)

    def everything(self) -> list[Op]:
        """What makes results under the ids that they have outside, and what writes."""
        for at, op in enumerate(self.undoing.ops):
            if op.writes and op.target not in (JOIN, REDUCE):
                facts, (number, _) = next((f, way) for f in self.undoing.known(op) for way in self.undoing.ways(op, f))
                self._call(op, _Source(at, facts, number))
        for value, (part, fact) in self.undoing.results.items():
            self.ops.append(Op(len(self.ops), "magis.alias", (Ref(self._need(part, fact)),), (), (value,)))
        return self.ops

    def _need(self, value: int, fact: Fact) -> int:
        """Id of the whole tensor that a value of the body is a part of."""
        source = self.undoing.facts[value][fact]
        if source is None:
            return self.undoing.given[value]
        if isinstance(source, _Alias):
            return self._need(source.value, source.fact)
        op = self.undoing.ops[source.at]
        made = self._call(op, source)[op.outputs.index(value)]
        return -1 if made is None else made  # never: it has a fact

    def _call(self, op: Op, source: _Source) -> tuple[int | None, ...]:
        if source not in self.emitted:
            inputs = [self._need(value, fact) for value, fact in zip(op.inputs(), source.inputs, strict=True)]
            way = _ways(signature(op, self.undoing.values), source.inputs, self.undoing.parts)[source.way]
            outputs = tuple(None if fact is None else self._fresh(fact.whole) for fact in way.outputs)
            self.emitted[source] = outputs
            self.ops.append(_sized(op, way.literals, self.undoing.parts, inputs, outputs))
        return self.emitted[source]

    def _fresh(self, looks: Looks) -> int:
        key = len(self.values)
        while key in self.values:
            key += 1
        self.values[key] = _value(key, looks)
        return key


def _sized(op: Op, literals: Sequence[Path], parts: int, inputs: Sequence[int], outputs: tuple[int | None, ...]) -> Op:
    """The whole call: literals times the number of parts, other values in and out."""
    queue = iter(inputs)

    def resized(arg: Arg, path: Path) -> Arg:
        if isinstance(arg, Ref):
            return Ref(next(queue))
        if isinstance(arg, tuple):
            return tuple(resized(item, (*path, at)) for at, item in enumerate(arg))
        return arg * parts if path in literals and isinstance(arg, int) else arg

    args = tuple(resized(arg, (at,)) for at, arg in enumerate(op.args))
    count = len(op.args)
    kwargs = tuple((name, resized(arg, (count + at,))) for at, (name, arg) in enumerate(op.kwargs))
    return replace(op, args=args, kwargs=kwargs, outputs=outputs)


# -- one operator ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=65536)
def _ways(text: str, facts: tuple[Fact, ...], parts: int) -> tuple[_Way, ...]:
    """The whole calls that a call (its signature) is one of ``parts`` parts of, given the facts of its inputs.

    Where every part takes the same, the call may be whole itself; where some literals are larger, too, it may still
    be cut (a factory, an expansion). Otherwise the labels decide.
    """
    op, small = parse(text)
    values = {number: _value(number, fact.whole) for number, fact in enumerate(facts)}
    if any(_part_shape(fact, parts) != small[number].shape for number, fact in enumerate(facts)):
        return ()
    found: list[_Way] = []
    same = all(fact.how == "same" for fact in facts)
    if same:
        made = _made(op, values)
        found += [_Way((), tuple(None if looks is None else Fact("same", looks) for looks in made))] if made else []
    places = [path for path, number in _literals((*op.args, *(arg for _, arg in op.kwargs)), ()) if number > 0]
    for count in range(MOST_LITERALS + 1):
        for literals in combinations(places, count):
            way = _cut(_sized(op, literals, parts, op.inputs(), ()), values, facts, literals, parts)
            if way is not None:
                found.append(way)
                if not same:
                    return tuple(found)
    return tuple(found)


def _cut(
    op: Op, values: Mapping[int, Value], facts: tuple[Fact, ...], literals: tuple[Path, ...], parts: int
) -> _Way | None:
    """The whole call, if one of its splits takes the inputs as the facts say and divides just those literals."""
    made = _made(op, values)
    if made is None:
        return None
    whole, known = _with_outputs(op, values)
    wanted = tuple(None if fact.how == "same" else fact.how for fact in facts)
    for split in splits(whole, known):
        if split.inputs == wanted and set(split.sizes) == set(literals) and split.extent % parts == 0:
            outputs = zip(made, split.outputs, strict=True)
            return _Way(literals, tuple(None if w is None or how is None else Fact(how, w) for w, how in outputs))
    return None


def _with_outputs(op: Op, values: Mapping[int, Value]) -> tuple[Op, dict[int, Value]]:
    """The call with results of its own, laid out as the operator makes them."""
    known = dict(values)
    outputs: list[int | None] = []
    taken = op.inputs()
    for each in describe(op, values):
        if each is None:
            outputs.append(None)
            continue
        key = len(known)
        storage = key if each.base is None else values[taken[each.base]].storage
        known[key] = Value(key, each.shape, each.stride, each.dtype, storage, each.offset)
        outputs.append(key)
    return replace(op, outputs=tuple(outputs)), known


def _made(op: Op, values: Mapping[int, Value]) -> tuple[Looks | None, ...] | None:
    """What the call makes; None if it refuses its arguments."""
    try:
        return tuple(None if m is None else (m.shape, m.stride, m.dtype) for m in describe(op, values))
    except VerifyError:
        return None


def _literals(arg: Arg, path: Path) -> Iterator[tuple[Path, int]]:
    if isinstance(arg, tuple):
        for at, item in enumerate(arg):
            yield from _literals(item, (*path, at))
    elif isinstance(arg, int) and not isinstance(arg, bool):
        yield path, arg


def _value(number: int, looks: Looks) -> Value:
    shape, stride, dtype = looks
    return Value(number, shape, stride, dtype, number)


def _looks(value: Value) -> Looks:
    return value.shape, value.stride, value.dtype


def _part_shape(fact: Fact, parts: int) -> tuple[int, ...] | None:
    """The shape of one of the parts; None where there are none of equal size."""
    shape = fact.whole[0]
    if isinstance(fact.how, str):
        return shape
    if fact.how >= len(shape) or shape[fact.how] % parts:
        return None
    return tuple(size // parts if dim == fact.how else size for dim, size in enumerate(shape))


def _words(how: int | str) -> str:
    return f"cut along {how}" if isinstance(how, int) else "whole" if how == "same" else f"a part of a {how}"


# -- whole steps -------------------------------------------------------------------------------------------------


def _digests(graph: Graph) -> tuple[list[str], list[str]]:
    """How each result comes about from the inputs, and each write, as digests that do not depend on ids or order."""
    ops, _ = _whole(graph)
    known = {value: f"input {value}" for value in graph.inputs}
    writes: list[str] = []
    for op in ops:
        if op.target == "magis.alias":
            known[op.made()[0]] = known[op.inputs()[0]]
            continue
        inputs = iter([known[value] for value in op.inputs()])
        text = f"{op.target} {_plain(op.args, inputs)} {[(name, _plain(arg, inputs)) for name, arg in op.kwargs]}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        known |= {value: f"{digest} {at}" for at, value in enumerate(op.outputs) if value is not None}
        if op.writes:
            writes.append(digest)
    return [known[value] for value in graph.outputs], sorted(writes)


def _plain(arg: Arg, inputs: Iterator[str]) -> str:
    if isinstance(arg, tuple):
        return f"[{', '.join(_plain(item, inputs) for item in arg)}]"
    return next(inputs) if isinstance(arg, Ref) else repr(arg)
