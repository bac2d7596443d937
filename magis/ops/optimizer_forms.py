"""The weight update of a step as ``torch.optim`` runs it on a device: per tensor, foreach, or fused.

By default, a GPU's update is foreach: each operator is one call for all weights of a group with one dtype, so that its
temporaries are as large as all of these weights together. Operators and temporaries follow ``_multi_tensor_adam``,
``_multi_tensor_sgd`` and the fused kernels call by call; locals live as long as in torch. Step counters, which torch
keeps on the host, are left out; fused kernels read them on the device.

A planned step updates weights soon after their gradients exist, by foreach operators on short lists (``most_bytes``).
Foreach kernels are element-wise, so results do not depend on the lists. They differ from the per-tensor loop on a GPU,
which divides by a number as a product with its reciprocal. On a CPU, foreach operators are loops of plain operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from magis.ops.optimizers import Numbers, OptimizerSpec, States, by_loop, numbers_of

Tensors = list[Tensor]


class Weight(NamedTuple):
    """Operands of one parameter's update; states are keyed as in ``state_names``."""

    name: str
    param: Tensor
    grad: Tensor | None
    state: Mapping[str, Tensor]


def updates_by_lists(rule: OptimizerSpec, device: str) -> bool:
    """Return True if torch's update on the device ("cpu" or "cuda") is foreach or fused over all weights."""
    return (
        not rule.stops and rule.kind not in ("none", "own") and any(each.way(device) != "loop" for each in rule.alone())
    )


def update(
    rule: OptimizerSpec,
    weights: Sequence[Weight],
    numbers: Numbers,
    *,
    device: str = "cpu",
    most_bytes: int | None = None,
) -> None:
    """Update the weights that have a gradient, one parameter group after another.

    Lists of a foreach call hold at most ``most_bytes`` of weights, or a single larger one; None: no limit.
    """
    if rule.stops or rule.kind == "none":
        return
    own = {each.name: each for each in rule.updates}
    for each in weights if own else ():
        if each.grad is not None:
            own[each.name].record(each.param, each.grad, [*each.state.values()])
    if own:
        return
    split = rule.split([weight.name for weight in weights])
    for group, positions, named in zip(rule.alone(), split, numbers_of(rule, numbers), strict=True):
        graded = [weights[each] for each in positions if weights[each].grad is not None]
        way = group.way(device)
        if way == "loop" or (most_bytes is not None and way == "foreach" and device == "cpu"):
            by_loop(group, *_columns(graded), named)
            continue
        run = _FUSED[group.kind] if way == "fused" else _FOREACH[group.kind]
        for some in _short_lists(graded, most_bytes):
            run(group, *_columns(some), named)


def _columns(weights: Sequence[Weight]) -> tuple[Tensors, Tensors, States]:
    grads = [each.grad for each in weights if each.grad is not None]
    return [each.param for each in weights], grads, [each.state for each in weights]


def _short_lists(weights: Sequence[Weight], most_bytes: int | None) -> Iterator[list[Weight]]:
    """Yield lists of consecutive weights of at most ``most_bytes`` in total, or a single one; one list if None."""
    found: list[Weight] = []
    held = 0
    for each in weights:
        if found and most_bytes is not None and held + each.param.nbytes > most_bytes:
            yield found
            found, held = [], 0
        found.append(each)
        held += each.param.nbytes
    if found:
        yield found


def _by_dtype(*lists: Tensors) -> Iterator[list[Tensors]]:
    """Yield the lists grouped by dtype, in torch's order."""
    for found, _ in Optimizer._group_tensors_by_device_and_dtype([*lists]).values():  # type: ignore[list-item]
        yield found  # type: ignore[misc]


def _states_named(states: States, name: str) -> Tensors:
    return [state[name] for state in states]


def _sgd(rule: OptimizerSpec, params: Tensors, grads: Tensors, states: States, numbers: Numbers) -> None:
    buffers = _states_named(states, "momentum_buffer") if rule.kind == "momentum" else []
    for some, given, moving in _by_dtype(params, grads, buffers):
        taken = _decayed(rule, some, given, decays=rule.weight_decay != 0)
        if moving:
            torch._foreach_mul_(moving, rule.momentum)
            torch._foreach_add_(moving, taken, alpha=numbers["undampened"] if rule.dampening else 1)
            if rule.nesterov:  # in-place on the gradients if ``taken`` is no copy
                torch._foreach_add_(taken, moving, alpha=rule.momentum)
            else:
                taken = moving
        torch._foreach_add_(some, taken, alpha=numbers["neg_lr"])


def _adam(rule: OptimizerSpec, params: Tensors, grads: Tensors, states: States, numbers: Numbers) -> None:
    beta1, beta2 = rule.betas
    largest = _states_named(states, "max_exp_avg_sq") if rule.amsgrad else []
    for lists in _by_dtype(
        params, grads, _states_named(states, "exp_avg"), _states_named(states, "exp_avg_sq"), largest
    ):
        # complex numbers as pairs of real numbers
        some, given, exp_avgs, exp_avg_sqs, most = (
            [torch.view_as_real(each) if each.is_complex() else each for each in tensors] for tensors in lists
        )
        if rule.weight_decay != 0 and rule.kind == "adamw":
            torch._foreach_mul_(some, numbers["decay"])
        taken = _decayed(rule, some, given, decays=rule.weight_decay != 0 and rule.kind == "adam")
        torch._foreach_lerp_(exp_avgs, taken, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, taken, taken, 1 - beta2)
        del taken
        if most:
            torch._foreach_maximum_(most, exp_avg_sqs)
        denoms = torch._foreach_sqrt(most or exp_avg_sqs)  # frees those of the previous dtype
        torch._foreach_div_(denoms, [numbers["bias_correction2_sqrt"]] * len(some))
        torch._foreach_add_(denoms, rule.eps)
        torch._foreach_addcdiv_(some, exp_avgs, denoms, [numbers["neg_step_size"]] * len(some))


def _decayed(rule: OptimizerSpec, params: Tensors, grads: Tensors, *, decays: bool) -> Any:
    """Return the gradients with ``maximize`` and weight decay applied."""
    taken: Any = torch._foreach_neg(grads) if rule.maximize else grads
    if decays and rule.maximize:
        torch._foreach_add_(taken, params, alpha=rule.weight_decay)
    elif decays:
        taken = torch._foreach_add(taken, params, alpha=rule.weight_decay)
    return taken


def _fused_sgd(rule: OptimizerSpec, params: Tensors, grads: Tensors, states: States, numbers: Numbers) -> None:
    buffers = _states_named(states, "momentum_buffer") if rule.kind == "momentum" else []
    for some, given, moving in _by_dtype(params, grads, buffers):
        torch._fused_sgd_(
            some, given, moving, weight_decay=rule.weight_decay, momentum=rule.momentum if moving else 0.0,
            lr=numbers["lr"], dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip


def _fused_adam(rule: OptimizerSpec, params: Tensors, grads: Tensors, states: States, numbers: Numbers) -> None:
    run: Any = torch._fused_adamw_ if rule.kind == "adamw" else torch._fused_adam_
    state = (_states_named(states, name) for name in ("exp_avg", "exp_avg_sq", "step"))
    for some, given, exp_avgs, exp_avg_sqs, steps in _by_dtype(params, grads, *state):
        torch._foreach_add_(steps, 1)
        run(
            some, given, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, lr=numbers["lr"], beta1=rule.betas[0],
            beta2=rule.betas[1], weight_decay=rule.weight_decay, eps=rule.eps, maximize=False,
        )  # fmt: skip


_FOREACH = {"sgd": _sgd, "momentum": _sgd, "adam": _adam, "adamw": _adam}
_FUSED = {"sgd": _fused_sgd, "momentum": _fused_sgd, "adam": _fused_adam, "adamw": _fused_adam}
