"""Two loops side by side: eager's, and one whose forward is compiled by the backend, with what was planned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from magis.extensions.compile.compile_options import CompileReport
from magis.extensions.compile.dynamo_backend import magis
from magis.runtime.measure import window_peak

BUDGET = 60


@contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Nothing that was compiled before or in the block is known outside of it."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def chain(width: int = 32, depth: int = 4, *parts: Callable[[], nn.Module]) -> nn.Sequential:
    """Layers that have something to recompute."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU(), *(part() for part in parts)]
    return nn.Sequential(*layers)


class Twins:
    """A module and its copy, each with an optimizer; the forward of the first, loss included, is compiled."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[..., Tensor],
        make: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        *,
        dynamic: bool | None = None,
        **options: Any,
    ) -> None:
        self.reports: list[CompileReport] = []
        self.modules = (module, copy.deepcopy(module))
        make = make or (lambda each: torch.optim.AdamW(each.parameters(), lr=1e-2))
        self.optimizers = tuple(make(each) for each in self.modules)
        first, second = self.modules
        settings = {"budget": BUDGET, "report": self.reports.append, **options}
        self.compiled = torch.compile(
            lambda inputs, *targets: loss_fn(first(inputs), *targets),
            backend=magis,
            dynamic=dynamic,
            options=settings,
        )
        self.forwards = (self.compiled, lambda inputs, *targets: loss_fn(second(inputs), *targets))

    def step(self, seed: int, *batch: Tensor) -> None:
        """Both take a step from the same random numbers; loss, gradients, state and generator agree bit by bit."""
        seen: list[list[Tensor | None]] = []
        for module, forward, optimizer in zip(self.modules, self.forwards, self.optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad(set_to_none=True)
            loss = forward(*batch)
            loss.backward()
            gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            optimizer.step()
            seen.append([loss.detach(), torch.get_rng_state(), *gradients, *module.state_dict().values()])
        assert len(seen[0]) == len(seen[1])
        for number, (ours, theirs) in enumerate(zip(*seen, strict=True)):
            assert (ours is None) == (theirs is None), number
            assert ours is None or (theirs is not None and torch.equal(ours, theirs)), number

    def peak(self, *batch: Tensor) -> int:
        """Measured bytes of a compiled forward and backward, with everything of it that stays: a batch norm in eval
        mode does not count batches."""
        module, forward = self.modules[0], self.forwards[0]
        self.optimizers[0].zero_grad(set_to_none=True)
        buffers = {name: each for name, each in module.named_buffers() if module.training or "batches" not in name}
        held = {id(each): each.nbytes for each in (*module.parameters(), *buffers.values(), *batch)}
        return sum(held.values()) + window_peak(lambda: forward(*batch).backward()).peak_bytes


def targets_of(texts: Sequence[str]) -> set[str]:
    """Names of operators without namespace and overload."""
    return {text.split(".")[1] for text in texts}
