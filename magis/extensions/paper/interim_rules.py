"""Interim rules of the paper: equivalent rewrites that move operators together so that aggregations apply.

The rules have inverses. Neither search plans with them; `benchmarks/rules.py` counts the places where they apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from magis.graph import Graph
from magis.rewrite.rules.matching import Bound, Index
from magis.rewrite.rules.rule_table import AGGREGATIONS, TIDYING, Rule, matches


def some_are_left(bound: Bound) -> bool:
    """Return False if a concatenation would be nested around all of its own inputs, which changes nothing."""
    return bool(bound.lists["l"] or bound.lists["r"])


INTERIM = (
    # the inverses of the aggregations
    Rule("split-mm", "split(mm(x, y), dim=-1) -> mm(x, *split(y, dim=-1))", inverse=("merge-mm", "cat-of-split")),
    Rule("split-mm-rows", "split(mm(y, x), dim=-2) -> mm(*split(y, dim=-2), x)",
        inverse=("merge-mm-rows", "cat-of-split")),
    Rule("split-addmm", "split(addmm(c, x, y), dim=-1) -> addmm(*split(c, dim=-1), x, *split(y, dim=-1))",
        inverse=("merge-addmm", "cat-of-split", "cat-of-split")),
    Rule("split-addmm-rows", "split(addmm(c, y, x), dim=-2) -> addmm(c, *split(y, dim=-2), x)",
        inverse=("merge-addmm-rows", "cat-of-split")),
    Rule("split-conv", "split(conv(x, y), dim=-3) -> conv(x, *split(y, dim=-4))",
        inverse=("merge-conv", "cat-of-split")),
    Rule("split-conv-bias", "split(convb(x, y, c), dim=-3) -> convb(x, *split(y, dim=-4), *split(c, dim=-1))",
        inverse=("merge-conv-bias", "cat-of-split", "cat-of-split")),
    Rule("split-conv-batch", "split(conv(x, y), dim=-4) -> conv(*split(x, dim=-4), y)",
        inverse=("merge-conv-batch", "cat-of-split")),
    Rule("unary-to-pieces", "split(unary(x), dim=d) -> unary(*split(x, dim=d))", inverse=("merge-unary",), exact=True),
    Rule("binary-to-pieces", "split(binary(x, y), dim=d) -> binary(*split(x, dim=d), *split(y, dim=d))",
        inverse=("merge-binary",), exact=True),
    Rule("unary-into-cat", "unary(cat(*a, dim=d)) -> cat(unary(*a), dim=d)", inverse=("merge-unary-cat",), exact=True),
    Rule("binary-into-cat", "binary(cat(*a, dim=d), cat(*b, dim=d)) -> cat(binary(*a, *b), dim=d)",
        inverse=("merge-binary-cat",), exact=True),
    Rule("split-sum", "mm(cat(a, c, dim=-1), cat(b, d, dim=-2)) -> add(mm(a, b), mm(c, d))", inverse=("merge-sum",)),
    # concatenations and splits
    Rule("nest-cat", "cat(*l, *a, *r, dim=d) -> cat(*l, cat(*a, dim=d), *r, dim=d)",
        inverse=("flatten-cat",), exact=True, where=some_are_left),
    Rule("mm-of-cat", "mm(x, cat(*a, dim=-1)) -> cat(mm(x, *a), dim=-1)", inverse=("cat-of-mm",)),
    Rule("cat-of-mm", "cat(mm(x, *a), dim=-1) -> mm(x, cat(*a, dim=-1))", inverse=("mm-of-cat",)),
    Rule("mm-of-cat-rows", "mm(cat(*a, dim=-2), x) -> cat(mm(*a, x), dim=-2)", inverse=("cat-of-mm-rows",)),
    Rule("cat-of-mm-rows", "cat(mm(*a, x), dim=-2) -> mm(cat(*a, dim=-2), x)", inverse=("mm-of-cat-rows",)),
    # associativity, commutativity
    Rule("add-right", "add(add(a, b), c) -> add(a, add(b, c))", inverse=("add-left",)),
    Rule("add-left", "add(a, add(b, c)) -> add(add(a, b), c)", inverse=("add-right",)),
    Rule("add-swap", "add(a, b) -> add(b, a)", inverse=("add-swap",), exact=True),
    Rule("mul-right", "mul(mul(a, b), c) -> mul(a, mul(b, c))", inverse=("mul-left",)),
    Rule("mul-left", "mul(a, mul(b, c)) -> mul(mul(a, b), c)", inverse=("mul-right",)),
    Rule("mul-swap", "mul(a, b) -> mul(b, a)", inverse=("mul-swap",), exact=True),
    Rule("mm-right", "mm(mm(a, b), c) -> mm(a, mm(b, c))", inverse=("mm-left",)),
    Rule("mm-left", "mm(a, mm(b, c)) -> mm(mm(a, b), c)", inverse=("mm-right",)),
    # distributivity
    Rule("mul-over-add", "mul(add(a, b), c) -> add(mul(a, c), mul(b, c))", inverse=("add-of-mul",)),
    Rule("add-of-mul", "add(mul(a, c), mul(b, c)) -> mul(add(a, b), c)", inverse=("mul-over-add",)),
    Rule("mm-over-add", "mm(add(a, b), c) -> add(mm(a, c), mm(b, c))", inverse=("add-of-mm",)),
    Rule("add-of-mm", "add(mm(a, c), mm(b, c)) -> mm(add(a, b), c)", inverse=("mm-over-add",)),
    Rule("mm-over-add-right", "mm(c, add(a, b)) -> add(mm(c, a), mm(c, b))", inverse=("add-of-mm-right",)),
    Rule("add-of-mm-right", "add(mm(c, a), mm(c, b)) -> mm(c, add(a, b))", inverse=("mm-over-add-right",)),
    # transposes
    Rule("t-of-mm", "t(mm(a, b)) -> mm(t(b), t(a))", inverse=("mm-of-t",)),
    Rule("mm-of-t", "mm(t(b), t(a)) -> t(mm(a, b))", inverse=("t-of-mm",)),
    Rule("t-of-add", "t(add(a, b)) -> add(t(a), t(b))", inverse=("add-of-t",), exact=True),
    Rule("add-of-t", "add(t(a), t(b)) -> t(add(a, b))", inverse=("t-of-add",), exact=True),
    Rule("t-of-cat", "t(cat(*a, dim=-2)) -> cat(t(*a), dim=-1)", inverse=("cat-of-t",), exact=True),
    Rule("t-of-cat-rows", "t(cat(*a, dim=-1)) -> cat(t(*a), dim=-2)", inverse=("cat-of-t-rows",), exact=True),
    # numbers
    Rule("scale-of-mm", "scale(mm(a, b)) -> mm(scale(a), b)", inverse=("mm-of-scale",)),
    Rule("mm-of-scale", "mm(scale(a), b) -> scale(mm(a, b))", inverse=("scale-of-mm",)),
    Rule("scale-of-mm-right", "scale(mm(a, b)) -> mm(a, scale(b))", inverse=("mm-of-scale-right",)),
    Rule("mm-of-scale-right", "mm(a, scale(b)) -> scale(mm(a, b))", inverse=("scale-of-mm-right",)),
    Rule("scale-of-add", "scale(add(a, b)) -> add(scale(a), scale(b))", inverse=("add-of-scale",)),
    Rule("add-of-scale", "add(scale(a), scale(b)) -> scale(add(a, b))", inverse=("scale-of-add",)),
    Rule("scale-of-t", "scale(t(a)) -> t(scale(a))", inverse=("t-of-scale",), exact=True),
    Rule("t-of-scale", "t(scale(a)) -> scale(t(a))", inverse=("scale-of-t",), exact=True),
    # other shapes
    Rule("add-of-view", "add(view(a), view(b)) -> view(add(a, b))", inverse=("view-of-add",), exact=True),
    Rule("view-of-add", "view(add(a, b)) -> add(view(a), view(b))", inverse=("add-of-view",), exact=True),
)  # fmt: skip

RULES = (*AGGREGATIONS, *TIDYING, *INTERIM)
"""All rules. Rematerialization, the inverse of ``derematerialize``, is a move of the search (``rewrite.realize``); ``a
-> t(t(a))`` and ``a -> split(cat(a))`` apply everywhere and gain nothing."""


def rule(name: str) -> Rule:
    """Return a rule by name. Raises KeyError for an unknown name."""
    return {each.name: each for each in RULES}[name]


def counted(graph: Graph, rules: Sequence[Rule] = RULES) -> Mapping[str, int]:
    """Return the number of places at which each rule applies, by name."""
    index = Index(graph)
    return {each.name: sum(1 for _ in matches(each, graph, index)) for each in rules}
