"""Limits of reserved bytes on simulated devices: a plain allocator, apart from the planner, replays what is found."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from magis.cases.run_case import CaseRun
from magis.planner.bench import Bench
from magis.planner.planning import plan, within_reserved
from magis.planner.subject import Subject
from magis.results import Case, CaseResult
from tests.oracles import plainly_reserved

DEVICE = "sim:h100"


class Uneven(nn.Module):
    """Activations of many sizes, between 1 and 30 MiB: freed ones leave gaps that the next ones do not fit."""

    def __init__(self) -> None:
        super().__init__()
        widths = (300, 700, 450, 1100, 250, 900, 500, 1300, 400, 300)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def uneven() -> tuple[object, ...]:
    return Uneven(), (torch.randn(5000, 300), torch.randn(5000, 300)), nn.functional.mse_loss


NAME = f"{__name__}:uneven"
CASE = Case(NAME, "magis", DEVICE, "paper", memory_limit_of="reserved", budget=500)


@cache
def bench() -> Bench:
    return Bench()


def run(case: Case) -> tuple[CaseResult, CaseRun, Subject]:
    subject = bench().subject(case)
    runs = CaseRun(case, subject)
    return runs.result(None, None), runs, subject


@pytest.mark.parametrize(("ratio", "met"), [(0.75, True), (0.1, False)])
def test_a_plan_that_meets_the_limit_is_served_within_it(ratio: float, met: bool) -> None:
    found, ran, subject = run(replace(CASE, memory_ratio=ratio))
    captured, workspace = subject.captured.original, subject.roofline.workspace
    eager = plainly_reserved(captured.graph, workspace, captured.deaths)
    assert found.original.reserved_bytes == eager
    assert found.memory_limit_bytes == int(Fraction(str(ratio)) * eager)
    assert ran.graph is not None
    planned = plainly_reserved(ran.graph, workspace)
    assert found.optimized.reserved_bytes == planned
    assert found.search.feasible == (planned <= found.memory_limit_bytes) == met


def test_of_plans_that_miss_the_limit_alike_the_fastest_is_taken() -> None:
    subject = bench().subject(CASE)
    fast = plan(subject, memory_limit=2**40, latency_limit_ns=None, budget=10, seconds=None, seed=0, stored=None)
    limit = (subject.reserved_bytes(fast.graph) or 0) - 2**20
    slow = replace(fast, latency_ns=3 * fast.latency_ns)
    plans = iter((slow, fast, *[slow] * 9))
    found = within_reserved(subject, limit, None, lambda _target, _left: next(plans))
    assert found.latency_ns == fast.latency_ns
    assert not found.feasible
