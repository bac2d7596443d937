"""Split rules of matrix products and attention kernels, forward and backward.

    (b, h, q, e), (b, h, s, e), (b, h, s, v), mask (b, h, q, s) broadcast -> (b, h, q, v), logsumexp (b, h, q)

Batch and heads can be split. Query rows are independent in the forward without a causal mask, which depends on row
indices; in the backward they sum into the gradients of key and value. With fewer key heads than query heads, equal
slices of both still match. With dropout, random numbers would change.
"""

from __future__ import annotations

from magis.graph.nodes import Value
from magis.ops.op_info import AttentionKernel
from magis.ops.operators import RANDOM
from magis.ops.splits.labels import Dims, LabelledCall, Labels, Path, aligned

_ALIGNMENT = 32
"""Multiple of query rows to which the memory-efficient kernel pads its logsumexp."""


def attention(call: LabelledCall) -> Labels | str:
    """Label batch, heads, and query rows of an attention's forward."""
    kernel = call.info.attention
    if kernel is None or call.arg(kernel.dropout, "dropout_p", 0.0) != 0.0:
        return RANDOM
    if len(call.shape(0)) != 4:
        return "not (batch, head, row, feature)"
    row, limit = _query_rows(call, kernel)
    made: list[Dims] = [["b", "h", row, None], ["b", "h", row]]
    inputs: dict[Path, Dims] = {
        (0,): ["b", "h", row, None],
        (1,): ["b", "h", None, None],
        (2,): ["b", "h", None, None],
        **_mask(call, kernel, row, 0),
    }
    # seeds and lengths: unused without dropout and packing
    rest = tuple("same" for _ in call.outputs[2:])
    return Labels(
        inputs,
        [*made, *(() for _ in rest)],
        combine=dict.fromkeys(("b", "h", "q"), (None, None, *rest)),
        limits={"q": limit} if limit else {},
    )


def attention_backward(call: LabelledCall) -> Labels | str:
    """Label batch and heads of an attention's backward, and query rows if logsumexp has one number per row."""
    kernel = call.info.attention
    if kernel is None or call.arg(kernel.dropout, "dropout_p", 0.0) != 0.0:
        return RANDOM
    if len(call.shape(1)) != 4:
        return "not (batch, head, row, feature)"
    if any(call.tensor(position) is not None for position in kernel.lengths):
        return "a packed batch has no batch dimension"
    row, _ = _query_rows(call, kernel)
    output, logsumexp = kernel.saved
    whole: Dims = ["b", "h", None, None]
    rows: Dims = ["b", "h", row, None]
    masks = _mask(call, kernel, row, 1)
    inputs: dict[Path, Dims] = {
        (0,): rows, (1,): rows, (2,): whole, (3,): whole, (output,): rows, (logsumexp,): ["b", "h", row], **masks,
    }  # fmt: skip
    of_mask = [_of_scores(call, call.shape_of_output(3), row, 1)] if len(call.outputs) > 3 else []
    sums = (None, "sum", "sum", "sum")[: len(call.outputs)]
    per_head = (None, None, None, "sum")[: len(call.outputs)]
    return Labels(inputs, [rows, whole, whole, *of_mask], combine={"q": sums, "b": per_head, "h": per_head})


def _query_rows(call: LabelledCall, kernel: AttentionKernel) -> tuple[str | None, int]:
    """Return the label of query rows, None if they cannot be split, and a number that n must also divide (0: any)."""
    if not kernel.queries or call.arg(kernel.causal, "is_causal", False) is not False:
        return None, 0
    first = 0 if kernel.saved == (-1, -1) else 1
    rows = call.shape(first)[2]
    saved: Value | None = call.outputs[1] if first == 0 else call.tensor(kernel.saved[1])
    if saved is None:
        return None, 0
    if "efficient" in call.name and saved.numel:
        return ("q", rows // _ALIGNMENT) if rows % _ALIGNMENT == 0 else (None, 0)
    return ("q", 0) if saved.numel == 0 or saved.shape[2] == rows else (None, 0)


def _mask(call: LabelledCall, kernel: AttentionKernel, row: str | None, query: int) -> dict[Path, Dims]:
    """Return the labels of the attention mask, by its position; empty without a mask."""
    value = call.tensor(kernel.mask, "attn_mask")
    where = call.at(kernel.mask, "attn_mask")
    return {} if value is None else {where: _of_scores(call, value.shape, row, query)}


def _of_scores(call: LabelledCall, shape: tuple[int, ...], row: str | None, query: int) -> Dims:
    """Return the labels of a tensor that broadcasts to (batch, head, query row, key)."""
    return aligned(shape, (*call.shape(query)[:3], call.shape(query + 1)[2]), ["b", "h", row, None])


# Matrix products, as einsums.
#
#     mm(a, b):          (m, k), (k, n) -> (m, n); k sums
#     baddbmm(c, a, b):  (b, m, n) broadcast, (b, m, k), (b, k, n) -> (b, m, n); not k: every part would add c


def product(call: LabelledCall) -> Labels | str:
    """Label batch, rows and columns of a matrix product; the contracted dimension sums unless a tensor is added."""
    first, (left, right, result) = int(call.info.adds), call.info.product
    inputs: dict[tuple[int, ...], list[str | None]] = {(first,): list(left), (first + 1,): list(right)}
    if first:
        inputs[(0,)] = aligned(call.shape(0), call.shape_of_output(), list(result))
    sums = {} if first else {label: "sum" for label in left if label not in result}
    return Labels(inputs, [list(result)], combine=sums, reason="every part would add the same tensor")


def linear(call: LabelledCall) -> Labels | str:
    """Label the dimensions of `input @ weight.T + bias`, with any number of leading dimensions."""
    leading = [f"d{index}" for index in range(len(call.shape(0)) - 1)]
    weight = ["n", "k"] if len(call.shape(1)) == 2 else ["k"]
    sums = {} if call.tensor(2, "bias") is not None else {"k": "sum"}
    bias = {call.at(2, "bias"): ["n"] if len(weight) == 2 else []}
    made = [*leading, "n"] if len(weight) == 2 else leading
    return Labels({(0,): [*leading, "k"], (1,): weight, **bias}, [made], combine=sums)
