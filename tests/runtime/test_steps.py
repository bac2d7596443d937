"""Steps that run: what is measured, what is left behind, and what does not fit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from magis.runtime.measure import window_peak
from tests.nets import ADAMW, FORWARD, NETS, Attention, Block, Net, rows
from tests.oracles import captured, eager_step, graph_step, same


def test_eager_is_torch_written_out() -> None:
    """Against the loop that everybody writes."""
    net = NETS["dropout"].build()
    step = eager_step(net)
    module = copy.deepcopy(net.module)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=net.rule.lr, weight_decay=net.rule.weight_decay, foreach=False
    )
    for seed in range(3):
        torch.manual_seed(seed)
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(module(*net.inputs), *net.targets)
        loss.backward()
        optimizer.step()
        torch.manual_seed(seed)
        step.prepare()
        assert same(step.run(), loss.detach())
    assert all(same(a, b) for a, b in zip(module.parameters(), step.module.parameters(), strict=True))
    states = [optimizer.state[p] for p in module.parameters()]
    names = [name for name, _ in module.named_parameters()]
    assert step.state().keys() == {f"{kind}:{name}" for name in names for kind in ("exp_avg", "exp_avg_sq")}
    for name, state in zip(names, states, strict=True):
        assert same(state["exp_avg"], step.state()[f"exp_avg:{name}"])


def test_gradients_are_none_before_and_there_after_the_window() -> None:
    step = eager_step(NETS["linear"].build())
    assert not step.gradients()
    step.run()
    assert set(step.gradients()) == {"weight", "bias"}
    step.prepare()
    assert not step.gradients()
    assert [p.grad for p in step.module.parameters()] == [None, None]


def test_a_generated_step_leaves_no_gradients() -> None:
    net = NETS["linear"].build()
    step = graph_step(captured(net).graph, net)
    kept = window_peak(step.run).kept_bytes
    assert kept == 5 * 3 * 4  # the loss, whose memory is as large as the output of the layer
    assert all(p.grad is None for p in step.module.parameters())


class Targets(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("explicit", [False, True])
def test_eager_attention_is_explicit_on_demand(explicit: bool) -> None:
    net = Net(Attention, rows(2, 6, 16), rows(2, 6, 16), explicit_attention=explicit).build()
    with Targets() as targets:
        eager_step(net).run()
    assert any("flash_attention" in name for name in targets.seen) != explicit
    assert any("softmax" in name for name in targets.seen) == explicit


def test_results_are_all_that_a_step_returns() -> None:
    for name in ("returns-tuple", "returns-dict", "returns-input", "optimizer-gradients", "linear"):
        net = NETS[name].build()
        eager, own = eager_step(net), graph_step(captured(net).graph, net)
        assert same(eager.run(), own.run())
        assert len(eager.results()) == len(own.results())
        assert all(same(a, b) for a, b in zip(eager.results(), own.results(), strict=True))
        eager.prepare()
        own.prepare()
        assert own.results() == ()


def test_state_starts_at_zero_in_the_layout_of_the_parameter() -> None:
    net = Net(
        lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), rows(1, 2, 5, 5), rows(1, 3, 3, 3), rule=ADAMW
    ).build()
    step = graph_step(captured(net).graph, net)
    state = step.state()
    assert set(state) == {f"{kind}:{name}" for kind in ("exp_avg", "exp_avg_sq") for name in ("weight", "bias")}
    assert state["exp_avg:weight"].stride() == step.module.weight.stride()
    assert all(not tensor.any() and not tensor.requires_grad for tensor in state.values())


def test_a_constant_is_made_afresh_in_every_step() -> None:
    """Although the forward changes it."""

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0]).mul_(x).sum()

    net = Net(lambda: Block(run), lambda: (torch.tensor([3.0, 4.0]),), loss_fn=None, rule=FORWARD).build()
    step = graph_step(captured(net).graph, net)
    assert [float(step.run()) for _ in range(3)] == [11.0] * 3
