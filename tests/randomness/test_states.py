"""States of generators that a step reads and sets: numbers, optimizer and generators end as in eager mode."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import AdamW

from magis import UsageError, optimize
from magis.capture import OptimizerSpec, capture
from magis.graph import Graph, dump, parse, verify
from magis.ops.generators import GET_STATE, SEED, SET_STATE, held_generators
from magis.results import Case
from tests.randomness.nets import DRAWS, NETS, WIDTH, Drawing, OwnGenerators, rows
from tests.training.loops import assert_same

adamw = partial(AdamW, lr=1e-2, foreach=False)


def agree(module: nn.Module, *, steps: int = 2, loss_fn: Any = F.l1_loss, ratio: float = 0.8) -> None:
    """An optimized loop and the same one in eager mode: everything bit for bit, states of generators included.

    Where no plan keeps the limit, one that needs as much as eager. What runs in parts rounds otherwise: its loss then
    is close, and its generators end where eager's do.
    """
    twin = copy.deepcopy(module)
    ours, theirs = adamw(module.parameters()), adamw(twin.parameters())
    data = rows()
    try:
        step = optimize(module, data, loss_fn, ours, memory_ratio=ratio, budget=40)
    except UsageError:
        step = optimize(module, data, loss_fn, ours, memory_ratio=1.0, budget=40)
    exactly = not step.report().fission
    for seed in range(steps):
        torch.manual_seed(seed)
        loss = step(*data)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        theirs.zero_grad()
        expected = loss_fn(twin(data[0]), data[1])
        expected.backward()
        theirs.step()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(loss, expected.detach()) if exactly else torch.allclose(loss, expected, rtol=1e-3)
    for name, own in held_generators(twin).items():
        assert torch.equal(own.get_state(), held_generators(module)[name].get_state())
    if not exactly:
        return
    ours.zero_grad()
    theirs.zero_grad()
    assert_same(module.state_dict(), twin.state_dict())
    assert_same(ours.state_dict(), theirs.state_dict())


def graph_of(module: nn.Module, device: str = "cpu", loss_fn: Any = F.l1_loss) -> Graph:
    inputs, targets = rows()
    graph = capture(module, (inputs,), (targets,), loss_fn, OptimizerSpec("sgd"), device=device).graph
    verify(graph)
    assert parse(dump(graph)) == graph
    return graph


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # reentrant ones in a reentrant one
@pytest.mark.parametrize("name", NETS)
def test_a_loop_draws_and_leaves_the_generator_as_eager_does(name: str) -> None:
    torch.manual_seed(0)
    agree(NETS[name](), ratio=0.95)


@pytest.mark.parametrize("name", DRAWS)
def test_every_random_operator_draws_as_in_eager_mode(name: str) -> None:
    torch.manual_seed(0)
    agree(_Still(DRAWS[name]), steps=2, loss_fn=_still_loss, ratio=1.0)
    graph = graph_of(_Still(DRAWS[name]), loss_fn=_still_loss)
    assert any(op.random for op in graph.ops if op.module == "drawing")


class _Still(nn.Module):
    """Draws in a module of its own; rows that are cut off are made up for."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.drawing, self.last = nn.Linear(WIDTH, WIDTH), _Draw(draw), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.last(self.drawing(self.first(x))), 0.2, True)


class _Draw(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)


def _still_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.l1_loss(output, targets[: len(output)])


def test_a_checkpoint_reads_the_state_and_sets_it_twice() -> None:
    targets = [op.target for op in graph_of(NETS["checkpoint"]()).ops if op.target.startswith("magis.")]
    assert targets == [GET_STATE] * 3 + [GET_STATE, SET_STATE, SET_STATE] * 3
    gpu = graph_of(NETS["checkpoint"](), "cuda")
    kinds = {gpu.storages[gpu.values[op.outputs[0] or 0].storage].kind for op in gpu.ops if op.target == GET_STATE}
    assert kinds == {"host"}  # no memory of the device


def test_a_capture_leaves_every_generator_alone() -> None:
    module = nn.Sequential(NETS["states"](), OwnGenerators())
    before = [torch.get_rng_state(), *(each.get_state() for each in held_generators(module).values())]
    graph = graph_of(module)
    after = [torch.get_rng_state(), *(each.get_state() for each in held_generators(module).values())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert {op.target for op in graph.ops} >= {GET_STATE, SET_STATE, SEED}
    assert torch.default_generator is torch.random.default_generator is torch._C.default_generator


# --- generators of a step's own ---------------------------------------------------------------------------------------


def test_a_saved_plan_finds_its_generators_again(tmp_path: Any) -> None:
    module, data = OwnGenerators(), rows()
    optimize(module, data, F.l1_loss, None, memory_ratio=0.9, budget=20).save(tmp_path / "plan")
    twin = copy.deepcopy(module)
    again = optimize(twin, data, F.l1_loss, None, memory_ratio=0.9, plan=tmp_path / "plan")
    torch.manual_seed(1)
    loss = again(*data)
    torch.manual_seed(1)
    assert torch.equal(loss, F.l1_loss(module(data[0]), data[1]).detach())


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpointed", "reentrant", "stated", "generating"])
def test_the_gate_sees_eagers_numbers_and_bytes(name: str) -> None:
    from magis import run_case

    case = Case(f"tests.randomness.nets:{name}", "magis", "cpu", "small", memory_ratio=0.85, budget=60, timing_rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = run_case(case)
    assert result.numbers == ("bit-identical" if not result.search.fission else "within tolerance")
    for figures in (result.original, result.optimized):
        assert figures.measured is not None
        assert figures.measured.tensor_bytes == figures.simulated.tensor_bytes
    assert result.original.measured is not None
    assert result.original.measured.peak_bytes == result.original.simulated.peak_bytes


@pytest.mark.parametrize("draw", ["dropout"])
def test_a_plan_that_draws_otherwise_is_told(draw: str) -> None:
    """The comparison looks at where the generator stands after the step, not only at what the step computes."""
    from magis.cases.comparison import compare
    from magis.runtime.steps import EagerStep, GraphStep

    torch.manual_seed(0)
    module = Drawing(DRAWS[draw])
    inputs, targets = rows()
    captured = capture(module, (inputs,), (targets,), F.l1_loss, OptimizerSpec("sgd"))
    twin = copy.deepcopy(module)
    eager = EagerStep(module, (inputs,), (targets,), F.l1_loss, OptimizerSpec("sgd"))
    ours = GraphStep(captured.graph, twin, (inputs,), (targets,), OptimizerSpec("sgd"))
    assert compare(eager, ours, 0) == "bit-identical"
    run = ours.run

    def draws_more() -> Tensor:
        found = run()
        torch.rand(1)
        return found

    ours.run = draws_more  # type: ignore[method-assign]
    assert compare(eager, ours, 0) == "differs: the state of the generator after step 1"
