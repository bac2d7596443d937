"""Eager's step without any mode, with whose numbers a recorded run is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend, sdpa_kernel

from magis.capture.autocast import autocast as casting
from magis.capture.captured import Captured
from magis.capture.contents import copies
from magis.capture.schemas import tensors_in
from magis.capture.snapshot import objects_kept
from magis.capture.stand_ins import stand_ins
from magis.ops.generators import generators_kept, held_generators, own_kept
from magis.ops.optimizers import OptimizerSpec
from magis.ops.python_objects import PREFIX


def plain_difference(
    recorded: Captured,
    module: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: Callable[..., Tensor] | None,
    rule: OptimizerSpec,
    *,
    explicit_attention: bool,
    autocast: str | None,
) -> str:
    """Describe in words where a recorded run (`Captured.seen`) and a plain eager run differ; return "" if they do not.
    Also "" if two plain runs differ, if the step has collectives, or if it writes to tensors that cannot be
    restored."""
    graph = recorded.graph
    written = {storage for op in graph.ops for storage, _ in op.writes}
    held = (graph.values[number] for number in graph.inputs if graph.values[number].name.startswith(PREFIX))
    if recorded.sends or any(value.storage in written for value in held):
        return ""
    trained = [] if rule.kind == "none" else [name for name, p in module.named_parameters() if p.requires_grad]

    def run() -> Iterator[tuple[str, Tensor]]:
        with ExitStack() as stack:
            stack.enter_context(unset_fake_temporarily())
            stack.enter_context(generators_kept())
            stand = stack.enter_context(stand_ins(module, inputs, targets, trained, copies))
            stack.enter_context(own_kept(held_generators(stand.module, loss_fn)))
            stack.enter_context(objects_kept({"module": stand.module, "loss": loss_fn}))
            if explicit_attention:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            result: Any = None
            for given, wanted in rule.micro_batches(stand.inputs, stand.targets):
                with torch.set_grad_enabled(rule.kind != "none"), casting(autocast):
                    made = stand.module(*given)
                    result = rule.share(made if loss_fn is None else loss_fn(made, *wanted))
                if rule.kind != "none":
                    result.backward()
            yield from (("the result", tensor.detach()) for tensor in tensors_in(result))
            grads = ((name, stand.parameters[name].grad) for name in trained)
            yield from ((f"the gradient of {name}", grad) for name, grad in grads if grad is not None)

    plain = [*run()]
    if not _differing(plain, recorded.seen) or _differing(plain, [tensor for _, tensor in run()]):
        return ""
    return _differing(plain, recorded.seen)


def _differing(plain: Sequence[tuple[str, Tensor]], others: Sequence[Tensor]) -> str:
    if len(plain) != len(others):
        return f"{len(plain)} results in place of {len(others)}"
    pairs = ((name, one, other) for (name, one), other in zip(plain, others, strict=True))
    return next((name for name, one, other in pairs if not torch.allclose(one, other, 0, 0, equal_nan=True)), "")
