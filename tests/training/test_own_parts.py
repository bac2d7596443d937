"""Parts of a step that are others at every one, or belong to nobody else: averages over all batches, shared weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from magis.api import Bench, check_case, run_case
from magis.capture import OptimizerSpec, capture
from magis.errors import CaptureError
from magis.models import from_function
from magis.results import Case
from tests.training.loops import BUDGET, Loops, batch, loss_of


class Averaged(nn.Module):
    """A batch norm that averages over all batches; called twice, and a third time in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32, momentum=None)
        self.fixed = nn.BatchNorm1d(32, momentum=None, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        x = checkpoint(lambda y: self.norm(torch.tanh(self.last(y))), x, use_reentrant=False)
        return torch.tanh(self.last(self.fixed(x)))


def test_statistics_that_average_over_all_batches_go_on_as_in_eager_mode() -> None:
    loops = Loops(Averaged(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    loops.agree()
    loops.module.eval()
    loops.twin.eval()
    loops.agree()
    loops.module.train()
    loops.twin.train()
    for each in (loops.module, loops.twin):
        each.norm.reset_running_stats()
    loops.agree()
    assert loops.module.norm.momentum is None


def gate(made: tuple[object, ...], ratio: float = 0.95) -> None:
    """A case of the gate: bytes exactly as they are measured, and eager's numbers."""
    make, bench = from_function("own", lambda: made), Bench()
    case = Case("own", "magis", "cpu", "small", memory_ratio=ratio, budget=BUDGET, timing_rounds=1)
    check_case(case, cache=bench, make=make)
    result = run_case(case, cache=bench, make=make, rough=True)
    assert result.numbers == "bit-identical"
    for step in (result.original, result.optimized):
        assert step.measured is not None
        assert (step.simulated.tensor_bytes, step.simulated.peak_bytes) == (
            step.measured.tensor_bytes,
            step.measured.peak_bytes,
        )


def test_the_gate_runs_them() -> None:
    gate((Averaged(), batch(), loss_of))


class Miscounting(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        return super().forward(x)


def test_counts_other_than_of_calls_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Miscounting(4, momentum=None))
    with pytest.raises(CaptureError, match=r"^1 has momentum None and counts 2 batches in 1 calls; give it a momentum"):
        capture(net, (torch.randn(3, 4),), (), lambda out: out.sum(), OptimizerSpec("sgd"))
