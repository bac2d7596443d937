"""Table of the rules ``before -> after`` (paper, TASO), and the functions that match and apply them.

Aggregations merge several small calls into a large one; tidying rules simplify the result. The neighbour *paper* has
further rules, and inverse ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from magis.graph import Graph, Op
from magis.rewrite.rules.draft import Draft, Refused, build, common_module, merge_weights
from magis.rewrite.rules.language import Pattern, calls, parse_pattern
from magis.rewrite.rules.matching import Bound, Index, occurrences
from magis.rewrite.rules.merged_weights import Merging
from magis.rewrite.rules.replacement import Edit, replaced


@dataclass(frozen=True)
class Rule:
    """A rewrite rule; ``text`` is "before -> after".

    ``exact``: both sides run equal operations per element, and so are bitwise equal (if kernels do not depend on the
    size). ``inverse``: the rules that undo this one, applied in order; empty: none, or another part of the project
    does.
    """

    name: str
    text: str
    inverse: tuple[str, ...] = ()
    exact: bool = False
    where: Callable[[Bound], bool] | None = None
    """Extra condition on a match, or None."""
    find: Callable[[Index], Iterator[Bound]] | None = None
    """Finder of matches, which binds the result to the list "a"; None: matches of the left side."""

    @cached_property
    def before(self) -> Pattern:
        return parse_pattern(self.text.partition(" -> ")[0])

    @cached_property
    def after(self) -> Pattern:
        return parse_pattern(self.text.partition(" -> ")[2])

    @cached_property
    def concatenates(self) -> bool:
        """True if the right side concatenates tensors, which may be weights."""
        return self.find is None and any(call.form == "cat" for call in calls(self.after))

    def occurrences(self, index: Index) -> Iterator[Bound]:
        """Yield all matches of the left side, including those where the right side is impossible."""
        found = occurrences(index, self.before) if self.find is None else self.find(index)
        return (bound for bound in found if self.where is None or self.where(bound))


@dataclass(frozen=True)
class Match:
    """A match of a rule in one graph; not valid for another graph."""

    rule: Rule
    bound: Bound

    @property
    def ops(self) -> tuple[int, ...]:
        """Return the ids of the matched operators."""
        return tuple(dict.fromkeys(self.bound.ops))


def matches(rule: Rule, graph: Graph, index: Index | None = None) -> Iterator[Match]:
    """Yield every match at which the rule can be applied. ``index`` may be shared by rules on one graph."""
    for bound in rule.occurrences(Index(graph) if index is None else index):
        match = Match(rule, bound)
        if attempt(graph, match) is not None:
            yield match


def apply(graph: Graph, match: Match) -> Graph:
    """Return the graph with the rule applied. Raises LookupError if the match is of another graph."""
    found = attempt(graph, match)
    if found is None:
        raise LookupError(f"{match.rule.name} does not apply at operators {match.ops}: a match of another graph?")
    return found


def attempt(graph: Graph, match: Match) -> Graph | None:
    """Return the graph with the rule applied; None if the result would be illegal."""
    try:
        return replaced([_edit(_with_weights(graph, [match])[0], match)])
    except Refused:
        return None


def _with_weights(graph: Graph, found: Sequence[Match]) -> tuple[Graph, list[Match]]:
    """Merge the weights that the matches concatenate; return the graph, and the matches for which that is possible."""
    possible: list[Match] = []
    if not any(match.rule.concatenates for match in found):
        return graph, [*found]
    merging = Merging(graph)
    for match in found:
        moves = merging.moves
        try:
            merge_weights(merging, match.rule.after, match.bound)
        except Refused:
            if merging.moves > moves:  # some of its weights are side by side now, in vain
                merging = Merging(graph)
                for each in possible:
                    merge_weights(merging, each.rule.after, each.bound)
        else:
            possible.append(match)
    return merging.graph(), possible


def _edit(graph: Graph, match: Match, beside: Draft | None = None) -> Edit:
    """Return the edit for a match. Raises Refused if the new calls do not accept the tensors."""
    draft = Draft(graph, match.ops, beside)
    made = build(draft, match.rule.after, match.bound)
    results = made if isinstance(made, tuple) else (made,)
    if len(results) != len(match.bound.roots):
        raise Refused("other results than before")
    instead = {old: new for old, new in zip(match.bound.roots, results, strict=True) if old != new}
    return Edit(draft, match.ops, instead)


def _together(graph: Graph, found: Sequence[Match], untouched: _Untouched) -> tuple[Graph, int]:
    """Apply matches of disjoint calls at once, or in halves if that fails; return the graph and the number applied."""
    if len(found) < 2:
        after = attempt(graph, found[0]) if found else None
        return (graph, 0) if after is None else (after, 1)
    try:
        return _at_once(graph, found)
    except Refused:
        half = len(found) // 2
        after, count = _together(graph, found[:half], untouched)
        rest = [match for match in found[half:] if untouched(after, match.bound)]
        after, more = _together(after, rest, untouched)
        return after, count + more


def _at_once(graph: Graph, found: Sequence[Match]) -> tuple[Graph, int]:
    """Apply matches at once. Raises Refused if one fails after weights have been merged, or two collide."""
    before = graph
    graph, possible = _with_weights(graph, found)
    edits: list[Edit] = []
    for match in possible:
        try:
            edits.append(_edit(graph, match, edits[-1].draft if edits else None))
        except Refused:
            if graph is not before:  # weights were merged for nothing
                raise
    return (replaced(edits), len(edits)) if edits else (graph, 0)


def twins(index: Index) -> Iterator[Bound]:
    """Yield duplicates: calls equal to an earlier one on equal contents (common subexpressions)."""
    groups: dict[object, list[Op]] = {}
    for op in index.graph.ops:
        if op.inputs() and index.takes_part(op):
            groups.setdefault((op.target, repr((op.args, op.kwargs)), op.reads), []).append(op)  # 0.0 == -0.0 == False
    for group in groups.values():
        first, *later = group
        for op in later:
            yield Bound(lists={"a": first.made()}, ops=(op.id,), roots=op.made())


LEADING = (
    # one input, several weights (query, key and value); those of the backward follow
    Rule("merge-mm", "mm(x, *a) -> split(mm(x, cat(*a, dim=-1)), *a, dim=-1)", inverse=("split-mm", "split-of-cat")),
    Rule("merge-addmm", "addmm(*c, x, *a) -> split(addmm(cat(*c, dim=-1), x, cat(*a, dim=-1)), *a, dim=-1)",
        inverse=("split-addmm", "split-of-cat", "split-of-cat")),
    Rule("merge-conv", "conv(x, *w) -> split(conv(x, cat(*w, dim=-4)), *w, dim=-3)",
        inverse=("split-conv", "split-of-cat")),
    Rule("merge-conv-bias", "convb(x, *w, *c) -> split(convb(x, cat(*w, dim=-4), cat(*c, dim=-1)), *w, dim=-3)",
        inverse=("split-conv-bias", "split-of-cat", "split-of-cat")),
)  # fmt: skip
AGGREGATIONS = (
    *LEADING,
    # the same call on all pieces
    Rule("merge-unary", "unary(*split(x, dim=d)) -> split(unary(x), dim=d)", inverse=("unary-to-pieces",), exact=True),
    Rule("merge-binary", "binary(*split(x, dim=d), *split(y, dim=d)) -> split(binary(x, y), dim=d)",
        inverse=("binary-to-pieces",), exact=True),
    Rule("merge-unary-cat", "cat(unary(*a), dim=d) -> unary(cat(*a, dim=d))", inverse=("unary-into-cat",), exact=True),
    Rule("merge-binary-cat", "cat(binary(*a, *b), dim=d) -> binary(cat(*a, dim=d), cat(*b, dim=d))",
        inverse=("binary-into-cat",), exact=True),
    # sums of products
    Rule("merge-sum", "add(mm(a, b), mm(c, d)) -> mm(cat(a, c, dim=-1), cat(b, d, dim=-2))", inverse=("split-sum",)),
    Rule("merge-sum-back", "add(mm(c, d), mm(a, b)) -> mm(cat(a, c, dim=-1), cat(b, d, dim=-2))",
        inverse=("split-sum", "add-swap")),
    Rule("merge-sum-views", "add(view(mm(a, b)), view(mm(c, d))) -> "
        "view(mm(cat(a, c, dim=-1), cat(b, d, dim=-2)))", inverse=("split-sum", "view-of-add")),
    Rule("merge-sum-views-back", "add(view(mm(c, d)), view(mm(a, b))) -> "
        "view(mm(cat(a, c, dim=-1), cat(b, d, dim=-2)))", inverse=("split-sum", "view-of-add", "add-swap")),
    Rule("merge-sum-chain", "add(add(r, view(mm(a, b))), view(mm(c, d))) -> "
        "add(r, view(mm(cat(a, c, dim=-1), cat(b, d, dim=-2))))", inverse=("split-sum", "view-of-add", "add-left")),
    Rule("merge-sum-chain-back", "add(add(r, view(mm(c, d))), view(mm(a, b))) -> "
        "add(r, view(mm(cat(a, c, dim=-1), cat(b, d, dim=-2))))",
        inverse=("split-sum", "view-of-add", "add-swap", "add-left")),
    # several inputs, one weight; weight gradients of layers with one input
    Rule("merge-mm-rows", "mm(*a, x) -> split(mm(cat(*a, dim=-2), x), *a, dim=-2)",
        inverse=("split-mm-rows", "split-of-cat")),
    Rule("merge-addmm-rows", "addmm(c, *a, x) -> split(addmm(c, cat(*a, dim=-2), x), *a, dim=-2)",
        inverse=("split-addmm-rows", "split-of-cat")),
    Rule("merge-conv-batch", "conv(*x, w) -> split(conv(cat(*x, dim=-4), w), *x, dim=-4)",
        inverse=("split-conv-batch", "split-of-cat")),
    # one call instead of two that compute the same
    Rule("derematerialize", "f(a), f(a) -> *a", exact=True, find=twins),
)  # fmt: skip

TIDYING = (
    Rule("t-of-t", "t(t(a)) -> a", exact=True),
    Rule("cat-of-split", "cat(*split(x, dim=d), dim=d) -> x", exact=True),
    Rule("split-of-cat", "split(cat(*a, dim=d), *a, dim=d) -> *a", exact=True),
    Rule("flatten-cat", "cat(*l, cat(*a, dim=d), *r, dim=d) -> cat(*l, *a, *r, dim=d)",
        inverse=("nest-cat",), exact=True),
    Rule("cat-of-t", "cat(t(*a), dim=-1) -> t(cat(*a, dim=-2))", inverse=("t-of-cat",), exact=True),
    Rule("cat-of-t-rows", "cat(t(*a), dim=-2) -> t(cat(*a, dim=-1))", inverse=("t-of-cat-rows",), exact=True),
)  # fmt: skip
"""Rules that remove calls and enable further aggregations."""

# Aggregations are applied until none applies, largest first, followed by tidying rules. ``quickest`` compares latencies
# to decide: one large product replaces three, but copies what they share.

GAIN = 0.005
"""Fraction of a step's latency that aggregations must save: larger calls leave a plan less choice (seen: with 0.97% the
whole front is better, with 0.23% its low-memory end is worse; docs/rules.md)."""


def quickest(graph: Graph, nanoseconds: Callable[[Graph], int]) -> Graph:
    """Return the graph with all aggregations, or the given graph if they save less than `GAIN` of its latency.

    Layers are mostly alike, so one module is tried first; if it saves too little, the others are not tried.
    """
    # The innermost modules that hold the calls of each leading aggregation, in program order.
    index = Index(graph)
    bounds = (bound for each in LEADING for bound in each.occurrences(index))
    modules = (common_module([graph.ops[index.position[number]].module for number in bound.ops]) for bound in bounds)
    sites = list(dict.fromkeys(modules))
    if not sites:
        return graph
    before = nanoseconds(graph)
    if sites[0]:  # not the whole step
        saved = before - nanoseconds(aggregated(graph, within=sites[0])[0])
        if len(sites) * saved < GAIN * before:
            return graph
    found, _ = aggregated(graph)
    return found if nanoseconds(found) <= (1 - GAIN) * before else graph


def aggregated(
    graph: Graph, rules: Sequence[Rule] = (*TIDYING, *AGGREGATIONS), within: str = ""
) -> tuple[Graph, Counter[str]]:
    """Apply the rules until none applies; return the graph and how often each rule applied.

    Every rule removes calls, so this ends. ``within``: path of a module; calls of other modules stay.
    """
    applied: Counter[str] = Counter()
    index = Index(graph)
    at = 0
    while at < len(rules):
        count = 0
        while (after := _everywhere(index, rules[at], within)) is not None:
            index = Index(after[0])
            count += after[1]
        applied[rules[at].name] += count
        at = 0 if count else at + 1  # tidy up before the next aggregation
    return index.graph, +applied


def _everywhere(index: Index, each: Rule, within: str) -> tuple[Graph, int] | None:
    """Apply a rule at all its matches in the index's graph; return the graph and the number of applications, None if 0.

    Matches changed by an earlier application are skipped; a new index finds them again if they still exist.
    """
    graph, count = index.graph, 0
    untouched = _Untouched(index)
    waiting = [bound for bound in each.occurrences(index) if _is_within(index, bound, within)]
    while waiting:
        taken: set[int] = set()
        chosen: list[Match] = []
        later: list[Bound] = []
        for bound in waiting:
            if not untouched(graph, bound):
                continue
            if taken.isdisjoint(bound.ops):
                chosen.append(Match(each, bound))
                taken.update(bound.ops)
            else:
                later.append(bound)
        graph, applied = _together(graph, chosen, untouched)
        count, waiting = count + applied, later
    return (graph, count) if count else None


def _is_within(index: Index, bound: Bound, module: str) -> bool:
    """Return True if all matched calls are of the module; sums of gradients, which have no module, count as its own."""
    if not module:
        return True
    modules = {index.graph.ops[index.position[number]].module for number in bound.ops} - {""}
    return all(f"{each}.".startswith(f"{module}.") for each in modules)


class _Untouched:
    """Predicate: True if the calls and values of a match are unchanged since the index was built."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._graph = index.graph
        self._ops = {op.id: op for op in index.graph.ops}

    def __call__(self, graph: Graph, bound: Bound) -> bool:
        if graph is not self._graph:
            self._graph, self._ops = graph, {op.id: op for op in graph.ops}
        before = self._index.graph
        if graph is before:
            return True
        if any(graph.values.get(value) != before.values[value] for value in _bound_values(bound)):
            return False
        makers = (self._index.maker[value].id for value in _bound_values(bound) if value in self._index.maker)
        ops = before.ops
        numbers = (*bound.ops, *makers)
        return all(self._ops.get(number) == ops[self._index.position[number]] for number in numbers)


def _bound_values(bound: Bound) -> Iterator[int]:
    yield from bound.roots
    yield from bound.values.values()
    for members in bound.lists.values():
        yield from members
