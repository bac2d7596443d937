"""Activation checkpointing, captured as eager runs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from magis.graph import verify
from magis.simulate.simulator import replay
from magis.strategies.single_device import checkpointed
from tests.nets import ADAMW, Built, Net, rows
from tests.oracles import captured, differences, eager_step, graph_step, history, measured, workspaces


class Wide(nn.Module):
    """A residual block that is wider inside; with a product with a number, of which eager keeps 8 bytes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(10, 60)
        self.down = nn.Linear(60, 10)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.down(self.drop(torch.tanh(self.up(x)) * 0.5))
        return x + h


def net(dropout: float = 0.0) -> Built:
    return Net(
        lambda: nn.Sequential(nn.Linear(5, 10), *(Wide(dropout) for _ in range(4)), nn.Linear(10, 3)),
        rows(20, 5), rows(20, 3), rule=ADAMW,
    ).build()  # fmt: skip


BLOCKS = ("1", "2", "3", "4")


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_simulated_bytes_are_the_measured_ones(dropout: float) -> None:
    built = net(dropout)
    plain = captured(built)
    with checkpointed(built.module, BLOCKS, preserve_rng_state=False):
        step = captured(built)
    verify(step.graph)
    profile = replay(step.graph, workspaces().of(step.graph), deaths=step.deaths, numbers=step.numbers)
    eager = eager_step(built)
    with checkpointed(eager.module, BLOCKS, preserve_rng_state=False):
        assert measured(eager, step.graph.persistent_bytes()) == (profile.peak_bytes, profile.tensor_bytes)
    without = replay(plain.graph, workspaces().of(plain.graph), deaths=plain.deaths)
    assert profile.peak_bytes - profile.persistent_bytes < 0.7 * (without.peak_bytes - without.persistent_bytes)


def test_the_recomputation_is_part_of_the_graph() -> None:
    built = net()
    with checkpointed(built.module, BLOCKS):
        step = captured(built)
        again = [op for op in step.graph.ops if op.target == "aten.tanh.default"]
        assert [op.phase for op in again] == ["forward"] * 4 + ["backward"] * 4
        expected = history(eager_step(built))
    assert differences(expected, history(graph_step(step.graph, built))) == []


def test_selective_checkpointing_computes_products_once_and_all_else_again() -> None:
    built = net()
    with checkpointed(built.module, BLOCKS, selective=True, preserve_rng_state=False):
        step = captured(built)
    verify(step.graph)

    def phases(target: str) -> list[str]:
        return [op.phase for op in step.graph.ops if op.target == target]

    assert phases("aten.addmm.default") == ["forward"] * 10
    assert phases("aten.tanh.default") == ["forward"] * 4 + ["backward"] * 4
    profile = replay(step.graph, workspaces().of(step.graph), deaths=step.deaths, numbers=step.numbers)
    eager = eager_step(built)
    with checkpointed(eager.module, BLOCKS, selective=True, preserve_rng_state=False):
        assert measured(eager, step.graph.persistent_bytes()) == (profile.peak_bytes, profile.tensor_bytes)
    with checkpointed(built.module, BLOCKS, preserve_rng_state=False):
        whole = captured(built)
    least = replay(whole.graph, workspaces().of(whole.graph), deaths=whole.deaths, numbers=whole.numbers)
    plain = captured(built)
    most = replay(plain.graph, workspaces().of(plain.graph), deaths=plain.deaths)
    assert least.tensor_bytes < profile.tensor_bytes < most.tensor_bytes


def test_the_module_is_its_old_self_afterwards() -> None:
    module = net().module

    def fail() -> None:
        with checkpointed(module, BLOCKS):
            assert "forward" in module.get_submodule("1").__dict__
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not [part for part in module.modules() if "forward" in part.__dict__]
