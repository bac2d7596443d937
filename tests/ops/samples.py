"""torch's own catalogue of its operators, `op_db`: samples of their arguments, and training steps of them."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import hypothesis
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.nets import FORWARD, Built
from tests.nets import OPTIMIZERS as RULES


@functools.cache
def operators() -> list[Any]:
    """Torch's operators of float32 arguments that are written in torch; loaded late, for it takes seconds."""
    profile = hypothesis.settings.get_current_profile_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as catalogue
    hypothesis.settings.load_profile(profile)  # torch loads one of its own
    # Some operators are listed behind a wrapper that seeds the generator and puts it back: it is theirs to move.
    catalogue.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    gc.collect()
    gc.freeze()  # each measurement collects garbage, and would look through all of it
    return [each for each in catalogue.op_db if torch.float32 in each.dtypes and not each.name.startswith("jiterator")]


def samples(operator: Any, most: int, dtype: torch.dtype = torch.float32) -> Iterator[Any]:
    """Some of its samples, spread evenly over all that torch has, drawn from a fixed seed."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(operator.sample_inputs("cpu", dtype, requires_grad=operator.supports_autograd))
    yield from every[:: -(-len(every) // most) or 1]


class Sampled(nn.Module):
    """Calls an operator on a sample, whose tensors it holds as parameters or buffers; returns a loss of all results."""

    def __init__(self, operator: Any, sample: Any) -> None:
        super().__init__()
        leaves, self._spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self._operator = operator.op
        self._leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                own = leaf.detach().clone()
                trained = operator.supports_autograd and (own.is_floating_point() or own.is_complex())
                held = nn.Parameter(own) if trained else nn.Buffer(own)
                setattr(self, f"given{number}", held)

    def forward(self, x: Tensor) -> Tensor:
        leaves = [
            getattr(self, f"given{number}") if leaf is None else leaf[0] for number, leaf in enumerate(self._leaves)
        ]
        first, args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        loss = x.sum()
        for result in pytree.tree_leaves(self._operator(first, *args, **kwargs)):
            if isinstance(result, Tensor):
                real = torch.view_as_real(result) if result.is_complex() else result.to(torch.float32)
                loss = loss + (real * real).sum()
        return loss


def step_of(operator: Any, sample: Any) -> Built:
    """A step that computes gradients of the sample's tensors, where the operator has any."""
    rule = RULES["gradients"] if operator.supports_autograd else FORWARD
    return Built(Sampled(operator, sample), (torch.zeros(1),), (), None, rule)
