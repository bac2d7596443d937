"""Matrix products, as einsums.

mm(a, b):            (m, k), (k, n) -> (m, n); k sums
baddbmm(c, a, b):    (b, m, n) broadcast, (b, m, k), (b, k, n) -> (b, m, n); k not, every part would add c
"""

from __future__ import annotations

from magis.aten.splits.labels import Call, Labels, Rule, aligned, rows

__all__ = ["RULES"]

_FORMS: dict[str, tuple[int, tuple[str, str, str]]] = {
    "mm": (0, ("mk", "kn", "mn")),
    "bmm": (0, ("bmk", "bkn", "bmn")),
    "mv": (0, ("mk", "k", "m")),
    "dot": (0, ("k", "k", "")),
    "vdot": (0, ("k", "k", "")),
    "ger": (0, ("m", "n", "mn")),
    "addmm": (1, ("mk", "kn", "mn")),
    "_addmm_activation": (1, ("mk", "kn", "mn")),
    "baddbmm": (1, ("bmk", "bkn", "bmn")),
    "addbmm": (1, ("bmk", "bkn", "mn")),
    "addmv": (1, ("mk", "k", "m")),
    "addr": (1, ("m", "n", "mn")),
}
"""Operator name -> position of the first factor (1: after a tensor that is added), labels of factors and product."""


def product(call: Call) -> Labels | str:
    """Batch, rows and columns; the contraction sums unless something is added."""
    first, (left, right, result) = _FORMS[call.name]
    inputs: dict[tuple[int, ...], list[str | None]] = {(first,): list(left), (first + 1,): list(right)}
    if first:
        inputs[(0,)] = aligned(call.shape(0), call.shape_of_output(), list(result))
    sums = {} if first else {label: "sum" for label in left if label not in result}
    return Labels(inputs, [list(result)], combine=sums, reason="every part would add the same tensor")


def linear(call: Call) -> Labels | str:
    """`input @ weight.T + bias`, with any number of leading dimensions."""
    leading = [f"d{index}" for index in range(len(call.shape(0)) - 1)]
    weight = ["n", "k"] if len(call.shape(1)) == 2 else ["k"]
    sums = {} if call.tensor(2, "bias") is not None else {"k": "sum"}
    bias = {call.at(2, "bias"): ["n"] if len(weight) == 2 else []}
    made = [*leading, "n"] if len(weight) == 2 else leading
    return Labels({(0,): [*leading, "k"], (1,): weight, **bias}, [made], combine=sums)


RULES: dict[str, Rule] = {**rows(product, " ".join(_FORMS)), **rows(linear, "linear")}
