"""Steps that run: what is measured, what is left behind, and what does not fit."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.nets import FORWARD, NETS, Block, Net
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


def test_a_constant_is_made_afresh_in_every_step() -> None:
    """Although the forward changes it."""

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0]).mul_(x).sum()

    net = Net(lambda: Block(run), lambda: (torch.tensor([3.0, 4.0]),), loss_fn=None, rule=FORWARD).build()
    step = graph_step(captured(net).graph, net)
    assert [float(step.run()) for _ in range(3)] == [11.0] * 3
