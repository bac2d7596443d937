"""Losses, forward and backward.

    mse_loss(a, b, mean):             (x), (x) -> (); x combines by "mean"
    nll_loss_forward(a, t, w, sum):   (rows, classes), (rows), (classes) -> (), (); rows sum
    nll_loss_backward(g, a, t, ...):  (), (rows, classes), (rows), ... -> (rows, classes)

With reduction "mean" the loss of one class per row divides by the total weight of the targets, which targets of the
ignored class do not add to: the mean of the parts' losses is not the loss, whatever the class weights. Its backward
takes the total weight as an argument, so its rows can always be cut. Element-wise losses average over a number of
elements known from the shape; their backward divides by it, and a part would divide by its own.
"""

from __future__ import annotations

from magis.aten.splits.labels import Call, Dims, Labels, Rule, aligned, broadcast, numbered, rows
from magis.aten.splits.types import Path

__all__ = ["RULES"]

NONE, MEAN, SUM = 0, 1, 2

_REDUCTION = {
    "mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4, "mse_loss_backward": 3, "smooth_l1_loss_backward": 3,
    "huber_loss_backward": 3, "soft_margin_loss_backward": 3, "binary_cross_entropy_backward": 4,
}  # fmt: skip
"""Position of the reduction, an int: 0 none, 1 mean (the default), 2 sum."""


def elementwise(call: Call) -> Labels | str:
    """One loss per element, or their mean or sum."""
    reduction = call.integer(_REDUCTION[call.name], "reduction", MEAN)
    common = broadcast([value.shape for value in call.tensors.values()])
    if common is None:
        return "tensors of several shapes"
    labels = numbered(common)
    inputs: dict[Path, Dims] = {path: aligned(value.shape, common, labels) for path, value in call.tensors.items()}
    if reduction == NONE:
        return Labels(inputs, [labels])
    how = "mean" if reduction == MEAN else "sum"
    return Labels(inputs, [()], combine={label: how for label in labels if label is not None})


def elementwise_backward(call: Call) -> Labels | str:
    """One gradient per element."""
    if call.integer(_REDUCTION[call.name], "reduction", MEAN) == MEAN:
        return "a part would divide by its own number of elements"
    common = call.shape_of_output()
    labels = numbered(common)
    return Labels({path: aligned(v.shape, common, labels) for path, v in call.tensors.items()}, [labels])


def nll(call: Call) -> Labels | str:
    """The loss of one class per row, and the total weight of the rows."""
    reduction = call.integer(3, "reduction", MEAN)
    scores = _scores(call.shape(0))
    targets = [label for index, label in enumerate(scores) if index != 1]
    if reduction == MEAN:
        return "the mean divides by a total weight that only all targets together give"
    inputs: dict[Path, Dims] = {(0,): scores, (1,): targets}
    # without reduction the total weight is left at zero
    combine: dict[str, tuple[str | None, ...]] = {
        label: ("sum", "sum") if reduction == SUM else (None, "same") for label in targets if label is not None
    }
    return Labels(inputs, [targets if reduction == NONE else (), ()], combine=combine)


def nll_backward(call: Call) -> Labels | str:
    """Rows; the total weight is given, the loss's gradient has rows only where the loss has them."""
    scores = _scores(call.shape(1))
    targets = [label for index, label in enumerate(scores) if index != 1]
    gradient = targets if call.integer(4, "reduction", MEAN) == NONE else []
    return Labels({(0,): gradient, (1,): scores, (2,): targets}, [scores])


def _scores(shape: tuple[int, ...]) -> list[str | None]:
    """(rows, classes) or (n, classes, height, width): everything but the classes; a single row has no label."""
    return numbered(shape, (1,)) if len(shape) > 1 else [None]


RULES: dict[str, Rule] = {
    **rows(elementwise, "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy"),
    **rows(elementwise, "binary_cross_entropy_with_logits"),
    **rows(elementwise_backward, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward"),
    **rows(elementwise_backward, "soft_margin_loss_backward binary_cross_entropy_backward"),
    **rows(nll, "nll_loss_forward nll_loss2d_forward"),
    **rows(nll_backward, "nll_loss_backward nll_loss2d_backward"),
}
