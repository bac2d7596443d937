"""Aggregations one after the other, as long as one applies, largest first, with the interim rules that tidy up behind.

Whether that is worth it (one large product instead of three, but a copy of what it shares) is a question of time, which
``quickest`` answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from magis.graph import Graph
from magis.rewrite.rules.draft import common_module
from magis.rewrite.rules.matching import Bound, Index
from magis.rewrite.rules.rule_table import AGGREGATIONS, RULES, Match, Rule, attempt, matches, rule

TIDYING = tuple(
    rule(name) for name in ("t-of-t", "cat-of-split", "split-of-cat", "flatten-cat", "cat-of-t", "cat-of-t-rows")
)
"""Interim rules that take calls away and lead towards further aggregations."""
LEADING = tuple(rule(name) for name in ("merge-mm", "merge-addmm", "merge-conv", "merge-conv-bias"))
"""Aggregations of calls with one input and several weights, which those of the backward pass follow."""
GAIN = 0.005
"""Share of a step's time that aggregations must save: larger calls leave less choice to whoever plans them (seen: with
0.97% the whole front is better, with 0.23% its lean end is worse; docs/rules.md)."""


def quickest(graph: Graph, nanoseconds: Callable[[Graph], int]) -> Graph:
    """The graph with all aggregations, or the very same graph where they save next to nothing.

    Layers are mostly alike: one that saves too little stands for all, and the others are not tried.
    """
    sites = _sites(graph)
    if not sites:
        return graph
    before = nanoseconds(graph)
    if sites[0]:  # not the whole step
        saved = before - nanoseconds(aggregated(graph, within=sites[0])[0])
        if len(sites) * saved < GAIN * before:
            return graph
    found, _ = aggregated(graph)
    return found if nanoseconds(found) <= (1 - GAIN) * before else graph


def _sites(graph: Graph) -> list[str]:
    """The innermost modules that hold what a leading aggregation would merge, in program order."""
    index = Index(graph)
    bounds = (bound for each in LEADING for bound in each.occurrences(index))
    modules = (common_module([graph.ops[index.position[number]].module for number in bound.ops]) for bound in bounds)
    return list(dict.fromkeys(modules))


def aggregated(
    graph: Graph, rules: Sequence[Rule] = (*TIDYING, *AGGREGATIONS), within: str = ""
) -> tuple[Graph, Counter[str]]:
    """The graph after applying the rules until none applies, and how often each did.

    Every one of them takes calls away, so this ends. ``within`` names a module: calls of others are left alone.
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
    """The graph after a rule was applied wherever the graph of the index shows it, and how often; None: nowhere.

    An occurrence that an earlier one has touched is left out; it shows again in the next index if it still stands.
    """
    graph, count = index.graph, 0
    untouched = _Untouched(index)
    for bound in each.occurrences(index):
        if _is_within(index, bound, within) and untouched(graph, bound):
            found = attempt(graph, Match(each, bound))
            if found is not None:
                graph, count = found, count + 1
    return (graph, count) if count else None


def _is_within(index: Index, bound: Bound, module: str) -> bool:
    """Whether no call of another module is matched; sums of gradients, and what came of them, are of none."""
    if not module:
        return True
    modules = {index.graph.ops[index.position[number]].module for number in bound.ops} - {""}
    return all(f"{each}.".startswith(f"{module}.") for each in modules)


class _Untouched:
    """Whether all that a match speaks of looks as in the graph that it was found in."""

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
        if any(graph.values.get(value) != before.values[value] for value in _values(bound)):
            return False
        makers = (self._index.maker[value].id for value in _values(bound) if value in self._index.maker)
        ops = before.ops
        numbers = (*bound.ops, *makers)
        return all(self._ops.get(number) == ops[self._index.position[number]] for number in numbers)


def _values(bound: Bound) -> Iterator[int]:
    yield from bound.roots
    yield from bound.values.values()
    for members in bound.lists.values():
        yield from members


def counted(graph: Graph, rules: Sequence[Rule] = RULES) -> Mapping[str, int]:
    """In how many places each rule applies."""
    index = Index(graph)
    return {each.name: sum(1 for _ in matches(each, graph, index)) for each in rules}
