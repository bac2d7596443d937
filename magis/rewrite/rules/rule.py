"""A rule: what it looks for, what it puts in its place, and where that is possible (paper, TASO rules).

The published implementation leaves these rules out. Here each is a row of ``table``: two patterns. Everything else is
common to all of them: a rule applies where its calls are functional and the graph that comes out is legal, with the
versions that the old calls met, one phase, and the innermost module that holds them all. A new call stands where the
first old one stood, or as soon after it as its inputs exist; what follows is moved no further than that demands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from magis.ir import Graph
from magis.rewrite.rules.build import build, with_merged_weights
from magis.rewrite.rules.draft import Draft, Refused
from magis.rewrite.rules.language import Pattern, parse_pattern
from magis.rewrite.rules.matching import Bound, Index, occurrences
from magis.rewrite.rules.replace import replaced

__all__ = ["Match", "Rule", "apply", "matches"]


@dataclass(frozen=True)
class Rule:
    """``text`` is "before -> after".

    ``exact``: element by element the same operations, hence the same bits (as far as kernels keep to that for tensors
    of other sizes). ``inverse`` names the rules that lead back, applied one after the other; none: nothing does, or
    other parts of the project (rematerialization).
    """

    name: str
    text: str
    inverse: tuple[str, ...] = ()
    exact: bool = False
    where: Callable[[Bound], bool] | None = None
    """A further condition, beyond that the calls of the right side take tensors of these sizes."""
    find: Callable[[Index], Iterator[Bound]] | None = None
    """Finds what no pattern says; the left side is then for the reader. The first of the bound list "a" is kept."""

    @cached_property
    def before(self) -> Pattern:
        return parse_pattern(self.text.partition(" -> ")[0])

    @cached_property
    def after(self) -> Pattern:
        return parse_pattern(self.text.partition(" -> ")[2])

    def occurrences(self, index: Index) -> Iterator[Bound]:
        """Where the left side occurs, whether or not the right side is possible there."""
        found = occurrences(index, self.before) if self.find is None else self.find(index)
        return (bound for bound in found if self.where is None or self.where(bound))


@dataclass(frozen=True)
class Match:
    """One place at which a rule applies; good for the graph that it was found in, and none other."""

    rule: Rule
    bound: Bound

    @property
    def ops(self) -> tuple[int, ...]:
        """Ids of the operators that the rule looks at."""
        return tuple(dict.fromkeys(self.bound.ops))


def matches(rule: Rule, graph: Graph, index: Index | None = None) -> Iterator[Match]:
    """Every place at which the rule applies, tried out. ``index`` may be shared by the rules of one graph."""
    for bound in rule.occurrences(Index(graph) if index is None else index):
        match = Match(rule, bound)
        if attempt(graph, match) is not None:
            yield match


def apply(graph: Graph, match: Match) -> Graph:
    """The graph with the rule applied; LookupError for a match of another graph."""
    found = attempt(graph, match)
    if found is None:
        raise LookupError(f"{match.rule.name} does not apply at operators {match.ops}: a match of another graph?")
    return found


def attempt(graph: Graph, match: Match) -> Graph | None:
    """The graph with the rule applied; None where the graph does not allow it."""
    rule, bound = match.rule, match.bound
    try:
        placed = graph if rule.find is not None else with_merged_weights(graph, rule.after, bound)
        draft = Draft(placed, match.ops)
        made = build(draft, rule.after, bound)
        results = made if isinstance(made, tuple) else (made,)
        if len(results) != len(bound.roots):
            raise Refused("other results than before")
        instead = {old: new for old, new in zip(bound.roots, results, strict=True) if old != new}
        return replaced(draft, match.ops, instead)
    except Refused:
        return None
