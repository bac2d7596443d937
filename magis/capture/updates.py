"""The update of a captured step: its state, the order of its weights, and updates in the backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from magis.capture.recorder import Recorder
from magis.ops.optimizer_forms import Weight, update
from magis.ops.optimizers import OptimizerSpec, sentinels

LISTS = 16
"""Number of lists in which a planned step updates its weights; each list takes as many kernel launches as one
weight."""


@contextmanager
def updated_early(
    recorder: Recorder,
    rule: OptimizerSpec,
    device: str,
    trained: Sequence[str],
    leaves: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    done: set[str],
) -> Iterator[None]:
    """Record each weight's update, and add its name to `done`, when its gradient is complete within the context."""

    def updated(weight: Tensor) -> None:
        grads = [leaf.grad for leaf in leaves]  # None but for this weight's
        weights = [Weight(*each) for each in zip(trained, leaves, grads, states, strict=True)]
        done.update(each.name for each in weights if each.grad is not None)
        recorder.phase = "update"
        register_states(recorder, trained, grads, states)
        with torch.no_grad():
            update(rule, weights, sentinels(rule), device=device)
        weight.grad, recorder.phase = None, "backward"

    with ExitStack() as hooks:
        for leaf in leaves:
            hooks.callback(leaf.register_post_accumulate_grad_hook(updated).remove)
        yield


def register_states(
    recorder: Recorder,
    trained: Sequence[str],
    grads: Sequence[Tensor | None],
    states: Sequence[Mapping[str, Tensor]],
) -> None:
    """Register the optimizer state of parameters with a gradient: torch's optimizers create none for the others."""
    for name, grad, state in zip(trained, grads, states, strict=True):
        if grad is None:
            continue
        for kind, tensor in state.items():
            recorder.register(tensor, "state", f"state:{kind}:{name}")


def soonest(recorder: Recorder, weights: Sequence[Weight]) -> list[Weight]:
    """Sort weights by the time at which their gradients are ready; weights without a gradient come last."""
    graded = [(recorder.value_of(each.grad), each) for each in weights if each.grad is not None]
    return [*(each for _, each in sorted(graded, key=lambda pair: pair[0])), *(w for w in weights if w.grad is None)]


def bytes_of_list(weights: Sequence[Weight], device: str) -> int:
    """Return the bytes of weights that a planned step updates in one call: few, as a call waits for all its gradients;
    0 on a CPU, where weights are updated one by one."""
    return 0 if device == "cpu" else sum(each.param.nbytes for each in weights) // LISTS
