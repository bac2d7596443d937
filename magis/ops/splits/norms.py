"""Split rules of norms and losses, forward and backward.

    native_layer_norm:   (rows, x), (x), (x) -> (rows, x), (rows), (rows); not x
    native_batch_norm:   (n, c, ...), (c) x 4 -> (n, c, ...), (c), (c); in training c alone
    native_group_norm:   (n, g, ...), (g), (g) -> (n, g, ...), (n, g), (n, g); the sizes N, C and group are literals

Statistics of a batch norm in training are over all dimensions but the channel, so only channels can be split. Running
statistics are cut along: every part writes its own slice of them, declared by the schema or not
(`OpInfo.undeclared`), so that each channel is written once.
"""

from __future__ import annotations

from collections.abc import Sequence

from magis.ops.splits.labels import Dims, LabelledCall, Labels, Path, aligned, broadcast, numbered, wrapped

COUPLED = "batch statistics couple the batch"


# -- layer norm and its kin ------------------------------------------------------------------------------------------


def layer_norm(call: LabelledCall) -> Labels | str:
    """Label leading dimensions of a layer norm; mean and rstd have them too."""
    labels = _leading(call, 0, 1)
    return Labels({(0,): labels}, [labels] * len(call.outputs), reason="all dimensions are normalized")


def layer_norm_backward(call: LabelledCall) -> Labels | str:
    """Label leading dimensions of a layer norm's backward, over which the gradients of weight and bias sum."""
    labels = _leading(call, 0, 2)
    last = 4 if call.name == "native_layer_norm_backward" else 3
    inputs: dict[Path, Dims] = {(position,): labels for position in (0, 1, *range(3, last + 1))}
    combine = dict.fromkeys((label for label in labels if label is not None), "sum")
    return Labels(inputs, [labels, (), ()], combine=combine, reason="all dimensions are normalized")


def _leading(call: LabelledCall, position: int, normalized: int) -> list[str | None]:
    rank = len(call.shape(position))
    count = rank - len(call.integers(normalized))
    return [f"d{index}" if index < count else None for index in range(rank)]


# -- batch norm ------------------------------------------------------------------------------------------------------


def batch_norm(call: LabelledCall) -> Labels | str:
    """Label channels of a batch norm; in eval mode, with given statistics, all dimensions."""
    return _batch_norm(call, (0,), "same")


def batch_norm_backward(call: LabelledCall) -> Labels | str:
    """Label channels of a batch norm's backward; in eval mode all, over which the gradients of weight and bias sum."""
    return _batch_norm(call, (0, 1), "sum")


def _batch_norm(call: LabelledCall, images: Sequence[int], how: str) -> Labels | str:
    """Label a batch norm whose other arguments have one number per channel (or none); `how`: merge of such an output
    over parts of other dimensions."""
    if any(value.numel and value.dtype == "uint8" for value in (*call.tensors.values(), *call.outputs) if value):
        return "the kernel's reserve has no dimensions"
    position = 3 if call.overload == "no_stats" else call.info.training
    evaluates = call.name.endswith(("_no_training", "_no_update"))
    training = not evaluates and (position is None or call.arg(position) is not False)
    image = ["c" if index == 1 else None if training else f"d{index}" for index in range(len(call.shape(0)))]
    inputs: dict[Path, Dims] = {path: ["c"] for path, value in call.tensors.items() if value.numel}
    inputs |= {(position,): image for position in images}
    combine = {label: how for label in image if label is not None and label != "c"}
    return Labels(inputs, [image, *(["c"] for _ in call.outputs[1:])], combine=combine, reason=COUPLED)


# -- group norm ------------------------------------------------------------------------------------------------------


def group_norm(call: LabelledCall) -> Labels | str:
    """Label samples and groups of a group norm; N, C and the number of groups are literals."""
    image = ["n", "g", *(None for _ in call.shape(0)[2:])]
    return Labels(
        inputs={(0,): image, (1,): ["g"], (2,): ["g"]},
        outputs=[image, ["n", "g"], ["n", "g"]],
        literals={(3,): "n", (4,): "g", (6,): "g"},
    )


def group_norm_backward(call: LabelledCall) -> Labels | str:
    """Label samples and groups of a group norm's backward; gradients of weight and bias sum over samples."""
    image = ["n", "g", *(None for _ in call.shape(0)[2:])]
    return Labels(
        inputs={(0,): image, (1,): image, (2,): ["n", "g"], (3,): ["n", "g"], (4,): ["g"]},
        outputs=[image, ["g"], ["g"]],
        literals={(5,): "n", (6,): "g", (8,): "g"},
        combine={"n": "sum"},
    )


# -- weight norm -----------------------------------------------------------------------------------------------------


def weight_norm(call: LabelledCall) -> Labels | str:
    """Label the dimension of a weight norm, the first or the last, which all tensors have."""
    dim = wrapped(call.integer(call.info.dim, "dim"), len(call.shape(0)))
    labels = ["k" if index == dim else None for index in range(len(call.shape(0)))]
    return Labels(dict.fromkeys(call.tensors, labels), [labels] * len(call.outputs))


# Losses, forward and backward.
#
#     mse_loss(a, b, mean):             (x), (x) -> (); x combines by "mean"
#     nll_loss_forward(a, t, w, sum):   (rows, classes), (rows), (classes) -> (), (); rows sum
#     nll_loss_backward(g, a, t, ...):  (), (rows, classes), (rows), ... -> (rows, classes)
#
# With reduction "mean", nll_loss divides by the total weight of the targets that are not ignored: the mean of the
# parts' losses is not the loss, whatever the class weights. Its backward takes the total weight as an argument, so its
# rows can always be split. Element-wise losses average over a number of elements known from the shape; their backward
# divides by it, and a part would divide by its own.

NONE, MEAN, SUM = 0, 1, 2


def elementwise(call: LabelledCall) -> Labels | str:
    """Label all dimensions of an element-wise loss, which parts merge by mean or sum if it is reduced."""
    reduction = call.integer(call.info.reduction, "reduction", MEAN)
    common = broadcast([value.shape for value in call.tensors.values()])
    if common is None:
        return "tensors of several shapes"
    labels = numbered(common)
    inputs: dict[Path, Dims] = {path: aligned(value.shape, common, labels) for path, value in call.tensors.items()}
    if reduction == NONE:
        return Labels(inputs, [labels])
    how = "mean" if reduction == MEAN else "sum"
    return Labels(inputs, [()], combine={label: how for label in labels if label is not None})


def elementwise_backward(call: LabelledCall) -> Labels | str:
    """Label all dimensions of an element-wise loss's backward, unless the reduction is "mean"."""
    if call.integer(call.info.reduction, "reduction", MEAN) == MEAN:
        return "a part would divide by its own number of elements"
    common = call.shape_of_output()
    labels = numbered(common)
    return Labels({path: aligned(v.shape, common, labels) for path, v in call.tensors.items()}, [labels])


def nll(call: LabelledCall) -> Labels | str:
    """Label the rows of `nll_loss` and its total weight, unless the reduction is "mean"."""
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


def nll_backward(call: LabelledCall) -> Labels | str:
    """Label the rows of `nll_loss_backward`; the loss's gradient has rows only without reduction."""
    scores = _scores(call.shape(1))
    targets = [label for index, label in enumerate(scores) if index != 1]
    gradient = targets if call.integer(4, "reduction", MEAN) == NONE else []
    return Labels({(0,): gradient, (1,): scores, (2,): targets}, [scores])


def _scores(shape: tuple[int, ...]) -> list[str | None]:
    """Label all but the classes of (rows, classes) or (n, classes, height, width); a single row has no label."""
    return numbered(shape, (1,)) if len(shape) > 1 else [None]
