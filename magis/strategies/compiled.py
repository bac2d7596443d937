"""What compiled code needs, without compiling: AOTAutograd's forward and backward on fake tensors.

What is kept for the backward is what torch.compile's partitioner decides with inductor's decompositions, budget
included. The code that inductor makes of it fuses operators, so that some of the tensors counted here never exist.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from magis.backend.measure import tensor_peak
from magis.capture import Workload
from magis.strategies.local import Local

__all__ = ["on_fake_tensors", "window_of_compiled"]


def window_of_compiled(technique: Local, work: Workload) -> int:
    """Peak bytes of tensors that forward and backward of a workload make; nothing is computed."""
    mode, work = on_fake_tensors(work)

    def whole() -> Any:
        return work.loss_fn(work.module(*work.inputs), *work.targets)

    torch.compiler.reset()
    call = torch.compile(whole, backend=_partitioned())
    with mode, technique.wrapped(work.module, work.blocks, states=False):
        _forward_and_backward(technique, work, call)  # compiles
        nbytes = tensor_peak(partial(_forward_and_backward, technique, work, call))
    torch.compiler.reset()
    return nbytes


def on_fake_tensors(work: Workload) -> tuple[FakeTensorMode, Workload]:
    """The workload on fake tensors, and the mode that these belong to: itself where all are fake, else a copy.

    Where some are fake already, or a mode is in force, the others become fakes of that one.
    """
    tensors = (*work.module.parameters(), *work.module.buffers(), *work.inputs, *work.targets)
    fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
    active = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)]
    mode = fakes[0].fake_mode if fakes else active[-1] if active else FakeTensorMode()
    if len(fakes) == len(tensors):
        return mode, work

    def fake(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor.detach())

    made: dict[int, Tensor] = {}  # what deepcopy hands out for a tensor: tied ones stay tied
    with _disable_current_modes():  # which would not take real tensors
        for parameter in work.module.parameters():
            made[id(parameter)] = nn.Parameter(fake(parameter), parameter.requires_grad)
        made.update((id(buffer), fake(buffer)) for buffer in work.module.buffers())
        module = copy.deepcopy(work.module, made)
        inputs, targets = tuple(map(fake, work.inputs)), tuple(map(fake, work.targets))
    return mode, replace(work, module=module, inputs=inputs, targets=targets)


def _forward_and_backward(technique: Local, work: Workload, call: Callable[[], Any]) -> None:
    for parameter in work.module.parameters():
        parameter.grad = None
    with technique.around():
        loss = call()
    loss.backward()


def _partitioned() -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed_nop,
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    return found
