"""Shapes and whole numbers that hang on data: planned as the example gives them, run by eager where they differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from magis import run_case
from magis.models import from_function
from magis.planner.bench import Bench
from magis.results import Case
from tests.nets import Block
from tests.training.loops import BUDGET, Loops, assert_same, batch, gate, net

Function = Callable[[nn.Module, Tensor], Tensor]


def choosing(function: Function) -> nn.Module:
    return Block(function, first=nn.Linear(32, 32), body=net())


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
    found = gate((choosing(FUNCTIONS[name]), batch(), squares), 0.9)
    assert found.conformance == "whole step"
    assert found.search.feasible


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_of_other_shapes_are_run_by_eager(name: str) -> None:
    loops = Loops(choosing(FUNCTIONS[name]), partial(SGD, lr=0.01, momentum=0.9), squares)
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


def drawn(m: nn.Module, x: Tensor) -> Tensor:
    """Every step has a shape of its own."""
    return m.body(x[nn.functional.dropout(m.first(x), 0.5).sum(-1) > 0])  # type: ignore[operator, no-any-return]


def branching(m: nn.Module, x: Tensor) -> Tensor:
    """A draw decides, ahead of a shape."""
    y = m.first(x)  # type: ignore[operator]
    if torch.rand(()) < 0.5:
        y = y * 2
    return m.body(y[x[:, 0] > 0])  # type: ignore[operator, no-any-return]


def doubling(m: nn.Module, x: Tensor) -> Tensor:
    """The batch itself is another one afterwards."""
    x.mul_(2)
    return m.body(m.first(x)[x[:, 0] > 0])  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("function", [drawn, branching, doubling])
def test_what_eager_runs_begins_where_the_planned_step_began(function: Function) -> None:
    loops = Loops(choosing(function), partial(SGD, lr=0.01, momentum=0.9), squares, memory_ratio=0.98)
    found = []
    for step in (quiet(loops.step), loops.eager):
        torch.manual_seed(3)
        data = [batch(), batch(seed=5), batch()]
        found.append(([step(*each) for each in data], data, torch.get_rng_state()))
    for theirs, ours in zip(*found, strict=True):
        assert_same(theirs, ours)
    loops.same()


def test_what_eager_leaves_in_attributes_has_no_graph() -> None:
    def keeping(m: nn.Module, x: Tensor) -> Tensor:
        m.kept = m.first(x)[x.sum(-1) > 0]  # type: ignore[operator]
        return m.body(m.kept)  # type: ignore[operator, no-any-return]

    loops = Loops(choosing(keeping), partial(SGD, lr=0.01), squares, memory_ratio=1.0)
    for seed in (1, 5, 1):
        quiet(loops.step)(*batch(seed=seed))
        loops.eager(*batch(seed=seed))
        assert not loops.module.kept.requires_grad
        assert torch.equal(loops.module.kept, loops.twin.kept)


def with_generator(m: nn.Module, x: Tensor) -> Tensor:
    y = m.first(x) * torch.rand(64, 1, generator=m.generator)  # type: ignore[operator, arg-type]
    return m.body(y[x.sum(-1) > 0])  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("function", [drawn, with_generator])
def test_the_gate_draws_as_eager_does(function: Function) -> None:
    def make() -> tuple[object, ...]:
        module = choosing(function)
        module.generator = torch.Generator().manual_seed(3)
        return module, batch(), squares

    case = Case("drawn", "magis", "cpu", "small", memory_ratio=0.95, budget=BUDGET, timing_rounds=1)
    found = run_case(case, cache=Bench(), make=from_function("drawn", make), rough=True)
    assert found.numbers == "bit-identical"
    assert found.optimized.simulated == found.optimized.measured
