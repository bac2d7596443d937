"""What a graph from a file may make a step do: operators of the step itself, and what plans are made of."""

from __future__ import annotations

from magis.aten.facts import FUNCTIONAL_FORM, IN_PLACE_FORM, OUT_FORM, VIEWS
from magis.cost.families import FAMILIES, name_of
from magis.ir import Graph, every_op

__all__ = ["foreign_operator"]

FORMS = frozenset({*FUNCTIONAL_FORM, *IN_PLACE_FORM, *(target for target, _ in OUT_FORM.values()), *VIEWS})
"""What operators of a step turn into."""


def foreign_operator(graph: Graph, step: Graph) -> str | None:
    """An operator of the graph that is neither one of the step's nor one that plans are made of, if any."""
    own = {op.target for op, _ in every_op(step)}
    for op, _ in every_op(graph):
        plain = op.target.startswith("aten.") and name_of(op.target) in FAMILIES
        of_plans = op.target.startswith("magis.") and op.target.count(".") == 1
        if not (op.target in own or op.target in FORMS or plain or of_plans):
            return op.target
    return None
