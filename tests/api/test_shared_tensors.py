"""Steps that write tensors which no copy of the module has: a loss's buffer, a global, what a hook adds up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from magis.cases.comparison import compare, compare_rounding, shared_tensors
from magis.cases.run_case import run_case
from magis.models import model_specs
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.results import Case

TOTAL = torch.zeros(3)


class Averaging(nn.Module):
    """A loss that keeps an average of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(out.detach().mean(), alpha=0.1)
        return nn.functional.mse_loss(out, target) + self.average


def totalled(out: Tensor, target: Tensor) -> Tensor:
    TOTAL.add_(1)
    return nn.functional.mse_loss(out, target) * TOTAL.sum()


def net(loss: Callable[..., Tensor]) -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return module, torch.randn(128, 64), torch.randn(128, 8), loss


def averaging() -> object:
    return net(Averaging())


def in_a_global() -> object:
    return net(totalled)


def in_a_closure() -> object:
    made = net(nn.functional.mse_loss)
    seen = torch.zeros(128, 8)

    def hook(_module: nn.Module, _given: object, out: Tensor) -> Tensor:
        seen.add_(out.detach())
        return out * seen.mean()

    made[0].register_forward_hook(hook)
    return made


NETS = ("averaging", "in_a_global", "in_a_closure")


def subject_of(name: str) -> Subject:
    return Subject(Source(name, partial(model_specs.get(f"{__name__}:{name}").build, "small"), "float32", "cpu", 0))


@pytest.mark.parametrize("name", NETS)
def test_each_step_finds_what_it_left_itself(name: str) -> None:
    found = run_case(Case(f"{__name__}:{name}", "magis", "cpu", "small", memory_ratio=0.8))
    assert found.numbers == "bit-identical"
    assert found.optimized.measured == found.optimized.simulated
    assert found.search.feasible


@pytest.mark.parametrize("name", NETS)
def test_so_do_steps_that_are_judged_by_their_rounding(name: str) -> None:
    subject = subject_of(name)
    assert compare_rounding(subject, subject.normal, 0) == "within tolerance"


def test_what_a_step_leaves_there_is_compared() -> None:
    subject = subject_of("in_a_global")
    shared = shared_tensors(subject)
    before = TOTAL.clone()
    eager, step = subject.eager(), subject.generated(subject.captured.graph)
    assert compare(eager, step, 0, shared) == "bit-identical"
    assert torch.equal(TOTAL, before), "what was there is put back"
    assert torch.equal(*(shared.left_by(each)["held:loss/@TOTAL"] for each in (eager, step)))
    assert torch.equal(shared.left_by(step)["held:loss/@TOTAL"], before + 3)
    ahead = subject.generated(subject.captured.graph)
    with shared.within(ahead):
        ahead.prepare()
        ahead.run()
    assert compare(subject.eager(), ahead, 0, shared).startswith("differs: loss of step 1")
