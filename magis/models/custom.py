"""Conversion of a user's own network, as returned by a factory or a test, to a Workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture.optimizer_rule import ALONE, fused_rule, has_hooks, is_left_alone, needs_closure, why_apart
from magis.capture.refusals import check_uncompiled, in_place_of
from magis.capture.workload import (
    Workload,
    as_batch,
    batch_of,
    own_loss,
    with_keywords,
    with_loss,
    with_targets,
)
from magis.errors import StepGivenError, UsageError, nearest
from magis.ops.optimizers import OPTIMIZER_KINDS, OptimizerSpec, OwnOptimizer

_EXPECTED = (
    "return a magis.api.Workload, (module, inputs, targets, loss_fn), (module, batch, loss_fn), or (module, batch) of "
    "a module that returns its loss; a torch optimizer may follow"
)
_TRAIN = "call train() on it (sub-modules may stay in eval mode), or pass optimizer='none' for inference"
PLAIN_SGD = OptimizerSpec("sgd", lr=1e-3)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block and restore its state afterwards; others are unchanged."""
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def as_workload(path: str, made: object, optimizer: object = None, who: str = "the factory") -> Workload:
    """Return the Workload named `path` from a factory's return value: a Workload or a tuple.

    Tuples are (module, inputs, targets, loss function), (module, batch, loss function) or (module, batch); `inputs` and
    `targets` are one tensor or a sequence of tensors, a batch is (inputs, targets) or a dictionary of the module's
    keywords. A torch optimizer may follow; else `optimizer` is the update (see `spec_of_optimizer`). Raises UsageError
    for anything else, with `who` returned it in the message, and StepGivenError for (step function, batch).
    """
    if isinstance(made, Workload):
        return replace(made, name=path)
    if isinstance(made, type):
        made = (made,)
    if not isinstance(made, tuple):
        raise UsageError(f"{path}: {who} returned a {type(made).__name__}", hint=_EXPECTED)
    for part in made:
        if isinstance(part, type):
            raise UsageError(f"{path}: {who} returned the class {part.__name__}", hint=in_place_of(part, "module"))
    parts, last = (made[:-1], made[-1]) if made and isinstance(made[-1], Optimizer) else (made, optimizer)
    if len(parts) not in (2, 3, 4):
        raise UsageError(f"{path}: {who} returned a tuple of {len(made)}", hint=_EXPECTED)
    module = parts[0]
    if len(parts) == 2 and last is None and isinstance(module, (FunctionType, MethodType, partial)):
        raise StepGivenError(path, module, parts[1])
    if not isinstance(module, nn.Module):
        raise UsageError(f"{path}: the module is a {type(module).__name__}, not an nn.Module", hint=_EXPECTED)
    check_uncompiled(module, f"{path}: the model")
    loss_fn: Callable[..., Tensor] = parts[-1] if len(parts) > 2 else own_loss
    if not callable(loss_fn):
        raise UsageError(f"{path}: the loss function is a {type(loss_fn).__name__}, not callable", hint=_EXPECTED)
    try:
        batch = batch_of(parts[1], parts[2]) if len(parts) == 4 else as_batch(parts[1])
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    if not module.training and "none" not in (last, getattr(last, "kind", "")):
        raise UsageError(f"{path}: the module is in eval mode, and a training step is asked for", hint=_TRAIN)
    whole, loss = with_loss(module, loss_fn)
    called = with_keywords(whole, batch)
    return Workload(
        name=path,
        module=called,
        inputs=batch.inputs,
        targets=batch.targets,
        loss_fn=with_targets(loss, batch) or own_loss,
        optimizer=PLAIN_SGD if last is None else spec_of_optimizer(path, last, called),
    )


def spec_of_optimizer(path: str, optimizer: object, module: nn.Module) -> OptimizerSpec:
    """Return the update rule of a torch optimizer of the module's parameters, an OptimizerSpec, or a name of a kind.
    Raises UsageError for others, and for an optimizer with hooks, a patched `step`, or the need for a closure."""
    if isinstance(optimizer, OptimizerSpec):
        return optimizer
    if isinstance(optimizer, Optimizer):
        return _spec_of_torch_optimizer(path, optimizer, module)
    if isinstance(optimizer, str) and optimizer in OPTIMIZER_KINDS:
        return OptimizerSpec(optimizer, lr=1e-3)
    if isinstance(optimizer, type):
        raise UsageError(
            f"{path}: the optimizer is the class {optimizer.__name__}", hint=in_place_of(optimizer, "module")
        )
    what = repr(optimizer) if isinstance(optimizer, str) else f"a {type(optimizer).__name__}"
    own = isinstance(getattr(optimizer, "optimizer", None), Optimizer)
    hint = f"{nearest(optimizer, OPTIMIZER_KINDS)}, or return a torch optimizer, of any class, behind the loss"
    raise UsageError(f"{path}: the optimizer is {what}", hint="give the optimizer that it drives" if own else hint)


def _spec_of_torch_optimizer(path: str, optimizer: Optimizer, module: nn.Module) -> OptimizerSpec:
    """Return the update rule of a torch optimizer: captured if supported, else run after the step."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not why_apart(optimizer, trained):
        return fused_rule(optimizer, trained)
    name, hint = type(optimizer).__name__, ALONE
    names = {id(parameter): parameter_name for parameter_name, parameter in trained.items()}
    if needs_closure(optimizer):
        raise UsageError(f"{path}: {name}.step calls forward and backward itself, several times a step", hint=hint)
    if not is_left_alone(optimizer) or has_hooks(optimizer):
        raise UsageError(f"{path}: {name}.step is patched, or hooks run before or after it", hint=hint)
    if not any(id(each) in names for group in optimizer.param_groups for each in group["params"]):
        hint = "make it of the parameters of the module that is returned"
        raise UsageError(f"{path}: the optimizer has none of the parameters that the model trains", hint=hint)
    return OptimizerSpec("apart", own=OwnOptimizer(optimizer, names))
