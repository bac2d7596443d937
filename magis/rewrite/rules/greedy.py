"""All aggregations, one after the other, as long as one applies: for figures and tests, not for the search.

Whether an aggregation is worth it (one large product instead of three, but a copy of what it shares) is for the search
to decide; here each is applied, largest first, with the interim rules that tidy up behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from magis.ir import Graph
from magis.rewrite.rules.matching import Index
from magis.rewrite.rules.rule import Match, Rule, attempt, matches
from magis.rewrite.rules.table import AGGREGATIONS, RULES, rule

__all__ = ["TIDYING", "aggregated", "counted"]

TIDYING = tuple(
    rule(name) for name in ("t-of-t", "cat-of-split", "split-of-cat", "flatten-cat", "cat-of-t", "cat-of-t-rows")
)
"""Interim rules that take calls away and lead towards further aggregations."""


def aggregated(graph: Graph, rules: Sequence[Rule] = (*TIDYING, *AGGREGATIONS)) -> tuple[Graph, Counter[str]]:
    """The graph after applying the rules until none applies, and how often each did.

    Every one of them takes calls away, so this ends.
    """
    applied: Counter[str] = Counter()
    at = 0
    while at < len(rules):
        count = 0
        while (found := _once(graph, rules[at])) is not None:
            graph = found
            count += 1
        applied[rules[at].name] += count
        at = 0 if count else at + 1  # tidy up before the next aggregation
    return graph, +applied


def _once(graph: Graph, each: Rule) -> Graph | None:
    """The graph after the first match of a rule."""
    tried = (attempt(graph, Match(each, bound)) for bound in each.occurrences(Index(graph)))
    return next((found for found in tried if found is not None), None)


def counted(graph: Graph, rules: Sequence[Rule] = RULES) -> Mapping[str, int]:
    """In how many places each rule applies."""
    index = Index(graph)
    return {each.name: sum(1 for _ in matches(each, graph, index)) for each in rules}
