"""`magis.optimize(..., compile=True)`: eager's numbers but for rounding, and the predicted bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import magis
from magis.errors import UsageError
from magis.extensions.compile import fused_plan
from magis.runtime.measure import collector_spared, window_peak

STEPS = 3


class Block(nn.Module):
    """A feed-forward part with a norm, dropout, and an activation in place."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        inner = F.gelu(self.up(self.norm(rows))).mul_(0.5)
        made: Tensor = rows + self.drop(self.down(inner))
        return made


def rows(count: int = 256, width: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 32))


def pictures() -> nn.Module:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(4))
    return nn.Sequential(*parts)


class Twins:
    """A module trained in eager mode, the same in double precision, and the same by a compiled plan."""

    def __init__(
        self,
        module: nn.Module,
        batch: tuple[Tensor, Tensor],
        make: Callable[[Any], torch.optim.Optimizer],
        ratio: float,
    ) -> None:
        self.modules = module, copy.deepcopy(module).double(), copy.deepcopy(module)
        self.batches = batch, tuple(each.double() for each in batch)
        self.optimizers = [make(each.parameters()) for each in self.modules]
        self.step = magis.optimize(
            self.modules[2], batch, F.mse_loss, self.optimizers[2], memory_ratio=ratio, compile=True
        )

    def run(self, *, exact: bool = True) -> None:
        """Train some steps; weights, buffers and losses must be eager's but for rounding."""
        for number in range(STEPS):
            losses = []
            for module, (inputs, targets), optimizer in zip(self.modules, self.batches, self.optimizers, strict=False):
                torch.manual_seed(number)
                loss = F.mse_loss(module(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            torch.manual_seed(number)
            found = self.step(*self.batches[0])
            torch.testing.assert_close(found, losses[0])
        eager, double, ours = (module.state_dict() for module in self.modules)
        for name, wanted in double.items() if exact else ():
            error = (ours[name].double() - wanted).abs().max()
            assert error <= 4 * (eager[name].double() - wanted).abs().max() + 1e-6 * wanted.abs().max(), name
        for name, wanted in eager.items():
            torch.testing.assert_close(ours[name], wanted, rtol=1e-3, atol=1e-4)

    def peak(self) -> int:
        """Measured bytes of a step with all that stays."""
        states = [each for state in self.optimizers[2].state.values() for each in state.values() if each.dim()]
        held = (*self.modules[2].parameters(), *self.modules[2].buffers(), *self.batches[0], *states)
        with collector_spared():
            window = window_peak(lambda: self.step(*self.batches[0])).peak_bytes
        total: int = window + sum(each.nbytes for each in held)
        return total


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_a_compiled_plan_trains_like_eager_in_the_predicted_bytes() -> None:
    twins = Twins(blocks(), (rows(seed=1), rows(seed=2)), adamw, 0.8)
    twins.run(exact=False)  # dropout draws other numbers in double precision
    report = twins.step.report()
    assert report.planned_bytes <= 0.8 * report.original_bytes
    assert twins.peak() == pytest.approx(report.planned_bytes, rel=0.03)
    assert "stretches" in str(report)


def test_layers_alike_share_a_function() -> None:
    twins = Twins(blocks(), (rows(seed=1), rows(seed=2)), adamw, 1.0)
    compiled = twins.step._entries[-1].plan.compiled
    assert compiled is not None
    assert compiled.count >= 2 * len(compiled.functions)
    left = {op.target for op in compiled.graph.ops}
    assert "aten.native_layer_norm.default" not in left  # faster even alone
    assert {"aten.bernoulli_.float", "aten.addmm.default", "aten.mm.default"} <= left


def test_statistics_of_batch_norms_and_activations_in_place() -> None:
    batch = tuple(torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    twins = Twins(pictures(), (batch[0], batch[1]), lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9), 0.8)
    twins.run()
    assert twins.peak() == pytest.approx(twins.step.report().planned_bytes, rel=0.03)
    entry = twins.step._entries[-1]
    (first,) = (each for each in entry.plan.graph.values.values() if each.name == "input:0")
    assert first.stride == batch[0].contiguous(memory_format=torch.channels_last).stride()


def test_a_saved_plan_is_compiled_when_it_is_read(tmp_path: Path) -> None:
    module, batch = blocks(), (rows(seed=1), rows(seed=2))
    options: dict[str, Any] = {"memory_ratio": 0.9, "compile": True}
    first = magis.optimize(module, batch, F.mse_loss, adamw(module.parameters()), **options)
    first.save(tmp_path / "plan.txt")
    other = blocks()
    again = magis.optimize(other, batch, F.mse_loss, adamw(other.parameters()), plan=tmp_path / "plan.txt", **options)
    assert again.report().planned_bytes == first.report().planned_bytes
    losses = []
    for step in (first, again):
        torch.manual_seed(3)
        losses.append(step(*batch))
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def test_parts_of_loops_are_compiled() -> None:
    """Little memory is enough only in parts; their bodies have stretches, too."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16))
    make = lambda given: torch.optim.SGD(given, lr=0.1)  # noqa: E731
    twins = Twins(module, (rows(512, 16, 1), rows(512, 16, 2)), make, 0.4)
    twins.run()
    assert twins.step.report().fission
    compiled = twins.step._entries[-1].plan.compiled
    assert compiled is not None
    loops = [op.body.graph for op in compiled.graph.ops if op.body is not None]
    assert any(op.target in compiled.functions for body in loops for op in body.ops)
    assert twins.peak() == pytest.approx(twins.step.report().planned_bytes, rel=0.03)


class Classes(nn.Module):
    """Scores of many classes, whose cross-entropy needs most of the memory."""

    def __init__(self, width: int = 16, classes: int = 2000) -> None:
        super().__init__()
        self.scores = nn.Linear(width, classes, bias=False)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(rows), labels)


def test_a_cross_entropy_needs_its_scores_once() -> None:
    """Their gradient takes the memory of their logarithms, and the labels' ones are never made as a tensor."""
    torch.manual_seed(0)
    module, labels = Classes(), torch.arange(256)
    scores = 256 * 2000 * 4
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = magis.optimize(module, ((rows(256, 16), labels), ()), None, optimizer, memory_ratio=1.0, compile=True)
    weights = sum(each.nbytes for each in module.parameters())
    assert step.report().planned_bytes < 1.5 * scores + 4 * weights
    losses = [step((rows(256, 16), labels), ()) for _ in range(2)]
    assert losses[1] < losses[0]
    held = (*module.parameters(), rows(256, 16), labels)
    with collector_spared():
        window = window_peak(lambda: step((rows(256, 16), labels), ())).peak_bytes
    assert window + sum(each.nbytes for each in held) == pytest.approx(step.report().planned_bytes, rel=0.03)


class Gated(nn.Module):
    """Two products, the first one's activation before the second."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        gate = F.silu(self.gate(rows))
        return gate * self.up(rows)


def test_an_activation_waits_for_the_product_that_it_joins() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Gated() for _ in range(3)))
    twins = Twins(module, (rows(seed=1), rows(seed=2)), adamw, 1.0)
    twins.run()
    compiled = twins.step._entries[-1].plan.compiled
    assert compiled is not None
    left = {op.target for op in compiled.graph.ops}
    assert left.isdisjoint({"aten.silu.default", "aten.silu_.default", "aten.mul.Tensor", "aten.mul_.Tensor"})
    assert twins.peak() == pytest.approx(twins.step.report().planned_bytes, rel=0.03)


def test_a_step_holds_the_functions_of_its_plans() -> None:
    first, second = (Twins(blocks(), (rows(seed=1), rows(seed=2)), adamw, 1.0).step for _ in range(2))
    known = [step._limits.compiler._functions for step in (first, second)]
    assert known[0].keys() == known[1].keys()
    assert known[0] is not known[1]


def test_a_changed_learning_rate_needs_no_other_code() -> None:
    twins = Twins(blocks(), (rows(seed=1), rows(seed=2)), adamw, 1.0)
    twins.run(exact=False)
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["lr"] = 1e-2
    twins.run(exact=False)


def test_what_cannot_be_compiled_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_given: object, **_settings: object) -> object:
        raise RuntimeError("no C++ compiler\nat all")

    monkeypatch.setattr(fused_plan, "compile_fx_inner", failing)
    module = blocks()
    with pytest.raises(UsageError, match="inductor cannot compile a part of this plan: no C\\+\\+ compiler"):
        magis.optimize(module, (rows(), rows()), F.mse_loss, adamw(module.parameters()), memory_ratio=1.0, compile=True)


def test_only_steps_of_a_cpu_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magis.frontends.optimize.device_of", lambda *_: "cuda")
    module = blocks()
    with pytest.raises(UsageError, match="compile=True for a step on cuda"):
        magis.optimize(module, (rows(), rows()), F.mse_loss, adamw(module.parameters()), memory_ratio=1.0, compile=True)
