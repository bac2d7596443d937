"""Two training loops side by side: a user's own in eager mode, and one with an optimized step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from magis import optimize
from magis.cases.check import check_case
from magis.cases.run_case import run_case
from magis.frontends.optimize import OptimizedStep
from magis.models import from_function
from magis.planner.bench import Bench
from magis.results import Case, CaseResult

BUDGET = 150
"""Plans per search: enough for small networks, and quick."""


def net(width: int = 32, depth: int = 4, *, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    """A chain that has something to recompute."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts += [nn.Linear(width, width), nn.Tanh()]
        parts += [nn.Dropout(dropout)] if dropout else []
        parts += [nn.BatchNorm1d(width)] if norm else []
    return nn.Sequential(*parts)


def batch(rows: int = 64, width: int = 32, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


loss_of = nn.functional.l1_loss


class Loops:
    """The same module twice, each with an optimizer of its own; `step` trains the first, `eager` the second."""

    def __init__(
        self,
        module: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer] | None,
        loss_fn: Any = loss_of,
        example: Any = None,
        **limits: Any,
    ) -> None:
        self.module, self.twin = module, copy.deepcopy(module)
        twins = (self.module, self.twin)
        self.optimizer, self.other = (None if make is None else make(each.parameters()) for each in twins)
        self.loss_fn, self.cast = loss_fn or itemgetter("loss"), limits.get("autocast")
        settings = {"memory_ratio": 0.95, "budget": BUDGET, **limits}
        example = batch() if example is None else example
        self.step: OptimizedStep = optimize(self.module, example, loss_fn, self.optimizer, **settings)
        assert not self.step.report().fission  # parts sum in another order: not bit by bit

    def eager(self, inputs: Any = (), targets: Any = (), **keywords: Tensor) -> Tensor:
        if self.other is not None:
            self.other.zero_grad(set_to_none=True)
        inputs, targets = (each if isinstance(each, tuple) else (each,) for each in (inputs, targets))
        with torch.autocast("cpu", self.cast, enabled=self.cast is not None):
            loss: Tensor = self.loss_fn(self.twin(*inputs, **keywords), *targets)  # nothing else holds the output
        loss.backward()
        if self.other is not None:
            self.other.step()
        return loss.detach()

    def agree(self, steps: int = 3, **how: Any) -> None:
        """Both loops go so many steps, with the same random numbers; everything must be the same, bit for bit."""
        for seed in range(steps):
            self.agree_on(*batch(seed=seed, **how), seed=seed)
        self.same()

    def agree_on(self, *data: Any, seed: int = 0, **keywords: Tensor) -> None:
        """One step of both loops with the same random numbers, which they leave alike: losses are the same."""
        torch.manual_seed(seed)
        ours, state = self.step(*data, **keywords), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(ours, self.eager(*data, **keywords))
        assert torch.equal(torch.get_rng_state(), state)

    def same(self) -> None:
        assert_same(self.module.state_dict(), self.twin.state_dict())
        if self.other is None:
            assert_same(*([each.grad for each in module.parameters()] for module in (self.module, self.twin)))
        else:
            assert_same(self.optimizer.state_dict(), self.other.state_dict())


def trained_as_planned(module: nn.Module, data: dict[str, Any], ratio: float, saved: Path) -> None:
    """Train three steps planned for a ratio, three whose plan is taken up from a file, and three in eager mode: the
    planned ones are the same bit by bit, and eager's within rounding, as loops sum in another order."""
    asked: dict[str, Any] = {"memory_ratio": ratio}
    ours, again = copy.deepcopy(module), copy.deepcopy(module)
    optimizer, *others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, ours, again))
    planned = optimize(ours, data, None, others[0], **asked)
    assert planned.report().memory_ratio <= ratio
    losses = [planned(**data) for _ in range(3)]
    planned.save(saved)
    taken = optimize(again, data, None, others[1], **asked, plan=saved)
    assert taken.report().planned_bytes == planned.report().planned_bytes
    for loss in losses:
        optimizer.zero_grad()
        value = module(**data)
        value.backward()
        optimizer.step()
        torch.testing.assert_close(loss, value.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(taken(**data), loss)
    torch.testing.assert_close(ours.state_dict(), module.state_dict(), rtol=1e-4, atol=1e-6)


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal in structure and in every bit."""
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)
    else:
        assert ours == theirs


def gate(made: tuple[object, ...], ratio: float = 0.95, seed: int = 0) -> CaseResult:
    """A case of the gate: bytes exactly as they are measured, and eager's numbers."""
    make, bench = from_function("own", lambda: made), Bench()
    case = Case("own", "magis", "cpu", "small", memory_ratio=ratio, budget=BUDGET, timing_rounds=1, seed=seed)
    check_case(case, cache=bench, make=make)
    result = run_case(case, cache=bench, make=make, rough=True)
    assert result.numbers == "bit-identical"
    assert result.original.simulated == result.original.measured
    assert result.optimized.simulated == result.optimized.measured
    return result
