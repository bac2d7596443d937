"""Shapes and whole numbers that hang on data: planned as the example gives them, run by eager where they differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from magis import MagisError, optimize, run_case
from magis.models import from_function
from magis.planner.bench import Bench
from magis.results import Case
from tests.training.loops import BUDGET, Loops, assert_same, batch, net

Function = Callable[[nn.Module, Tensor], Tensor]


class Choosing(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.body, self._function = nn.Linear(32, 32), net(), function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


def masked(m: nn.Module, x: Tensor) -> Tensor:
    return m.body(m.first(x)[x.sum(-1) > 0])  # type: ignore[operator, no-any-return]


def written(m: nn.Module, x: Tensor) -> Tensor:
    y = m.first(x)  # type: ignore[operator]
    y[x.sum(-1) > 0] = m.body(x[x.sum(-1) > 0])  # type: ignore[operator]
    return y  # type: ignore[no-any-return]


def rows(m: nn.Module, x: Tensor) -> Tensor:
    """A mixture of two experts, each on the rows that are its own."""
    out = torch.zeros_like(x)
    for expert, chosen in ((m.first, x[:, 0] > 0), (m.body, x[:, 0] <= 0)):
        mine = chosen.nonzero().squeeze(1)
        out = out.index_add(0, mine, expert(x[mine]))  # type: ignore[operator]
    return out


def counted(m: nn.Module, x: Tensor) -> Tensor:
    """The same with sorted rows and how many there are for each, as numbers of Python."""
    which = (x[:, 0] > 0).long()
    parts = x[which.argsort(stable=True)].split(torch.bincount(which, minlength=2).tolist())
    return torch.cat([m.first(parts[0]), m.body(parts[1])])  # type: ignore[operator]


def cut(m: nn.Module, x: Tensor) -> Tensor:
    return m.body(m.first(x)[: int((x[:, 0] > 0).sum())])  # type: ignore[operator, no-any-return]


def repeated(m: nn.Module, x: Tensor) -> Tensor:
    return m.body(m.first(x).repeat_interleave((x[:, 0] > 0).long() + 1, 0))  # type: ignore[operator, no-any-return]


def distinct(m: nn.Module, x: Tensor) -> Tensor:
    _, inverse = (3 * x[:, 0]).round().unique(return_inverse=True)
    return m.body(m.first(x))[: inverse.max()]  # type: ignore[operator, no-any-return]


FUNCTIONS: dict[str, Function] = {
    each.__name__: each for each in (masked, written, rows, counted, cut, repeated, distinct)
}


def squares(out: Tensor, _target: Tensor) -> Tensor:
    return out.square().sum()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gate_runs_what_its_batch_makes(name: str) -> None:
    make = from_function(name, lambda: (Choosing(FUNCTIONS[name]), batch(), squares))
    case = Case(name, "magis", "cpu", "small", memory_ratio=0.9, budget=BUDGET, timing_rounds=1)
    found = run_case(case, cache=Bench(), make=make, rough=True)
    assert found.conformance == "whole step"
    assert found.numbers == "bit-identical"
    assert found.search.feasible
    assert found.original.simulated == found.original.measured
    assert found.optimized.simulated == found.optimized.measured


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_of_other_shapes_are_run_by_eager(name: str) -> None:
    loops = Loops(Choosing(FUNCTIONS[name]), partial(SGD, lr=0.01, momentum=0.9), squares)
    data = [batch(), batch(seed=5), batch()]
    losses = [[step(*each) for each in data] for step in (quiet(loops.step), loops.eager)]
    assert_same(*losses)
    loops.same()
    assert loops.step.report().planned_bytes < loops.step.report().original_bytes


def quiet(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*data: Tensor) -> Tensor:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loss = step(*data)
        assert all("another way" in str(each.message) for each in told)
        return loss

    return run


def test_shapes_that_draws_decide_are_refused() -> None:
    drawn: Function = lambda m, x: m.body(x[nn.functional.dropout(x, 0.5).sum(-1) > 0])  # type: ignore[operator]  # noqa: E731
    with pytest.raises(MagisError, match=r"a shape that hangs on data is .* for this batch, .* when it was captured"):
        optimize(Choosing(drawn), squares, None, batch(), memory_ratio=0.9, budget=1)
