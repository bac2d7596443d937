"""Audits: a step that changes where its guards do not see it ends in one line, and no other step ever does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW

from magis.errors import CaptureError
from magis.frontends import audits
from magis.frontends.audits import Audits
from magis.frontends.optimized_step import OptimizedStep
from magis.frontends.optimizer_state import Guards
from magis.runtime.measure import window_peak
from tests.training.loops import Loops, batch, net

LIMITS: dict[str, Any] = {"latency_ratio": 1.5, "memory_ratio": None, "budget": 40}
WORLD = {"factor": 1.5, "twice": False, "raises": False}


class Reads(nn.Module):
    """Layers between which something is read off a global."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.gate = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        if WORLD["raises"]:
            raise ValueError("not today")
        hidden = torch.tanh(self.one(x)) * WORLD["factor"]
        return self.two(self.gate(hidden) if WORLD["twice"] else hidden)


class Keeps(Reads):
    """The same, with a tensor, a number and a place in a ring that every forward reads and leaves others in."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.heat, self.place = torch.zeros(32), 3.0, 8
        self.register_buffer("ring", torch.zeros(40, 32))

    def forward(self, x: Tensor) -> Tensor:
        self.mean, self.heat = self.mean * 0.9 + x.mean(0), self.heat * 0.97
        out: Tensor = super().forward(x) / self.heat - self.mean + self.ring.mean()
        self.ring[self.place : self.place + 2] = x[:2]
        self.place += 2
        return out


@pytest.fixture
def world() -> Iterator[dict[str, Any]]:
    before = dict(WORLD)
    yield WORLD
    WORLD.update(before)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards that see nothing of what has changed."""
    monkeypatch.setattr(Guards, "changes", lambda _self, _batch: iter(()))


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the steps that are audited: each one."""
    numbers: list[int] = []
    check = Audits.check

    def counted(self: Audits, number: int, difference: Callable[[], str]) -> CaptureError | None:
        numbers.append(number)
        return check(self, number, difference)

    monkeypatch.setattr(Audits, "_schedule", lambda self: None)
    monkeypatch.setattr(Audits, "check", counted)
    return numbers


def audits_of(step: OptimizedStep) -> Audits:
    return step._entries[-1].audits


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "number": ({"factor": 1.25}, "aten.mul.Tensor .* 1.25.*, now, .* 1.5.* planned"),
    "way": (
        {"twice": True},
        "aten.t.default .* in module 'gate' at .*test_audits.py:.* now, .* planned",
    ),
    "error": ({"raises": True}, "it is refused, ValueError in module .* at .*test_audits.py:.*: not today"),
    "sign of zero": ({"factor": -0.0}, "-0.0"),
}


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize(("name", "make"), [*((name, Reads) for name in CHANGES), ("number", Keeps), ("way", Keeps)])
def test_a_change_that_guards_do_not_see_ends_in_one_line(
    name: str, make: type[Reads], world: dict[str, Any], audited: list[int]
) -> None:
    changed, line = CHANGES[name]
    if name == "sign of zero":
        world["factor"] = 0.0
    loops = Loops(make(), partial(SGD, lr=0.1), **LIMITS)
    loops.agree(3)
    audits_of(loops.step).due = float("inf")
    world.update(changed)
    for seed in range(2):
        loops.step(*batch(seed=seed))  # nobody looks
    weights = [each.clone() for each in loops.module.parameters()]
    audits_of(loops.step).due = 0.0
    with pytest.raises(CaptureError, match=line) as raised:
        loops.step(*batch())
    assert "at some step from 4 to 6: " in str(raised.value)
    assert "\n" not in str(raised.value)
    assert all(map(torch.equal, loops.module.parameters(), weights))
    assert audited == [1, 2, 3, 6]
    if name != "error":  # the next step is planned for what is there now
        loops.twin.load_state_dict(loops.module.state_dict())
        vars(loops.twin).update({key: vars(loops.module)[key] for key in ("mean", "heat", "place") if make is Keeps})
        loops.agree(2)


def test_a_difference_that_does_not_come_again_stops_nobody() -> None:
    told = iter(["one", "", "one", "other", ""])
    found = Audits(costs=1.0, agreed=3)
    assert all(found.check(number, lambda: next(told)) is None for number in (10, 20))
    assert found.agreed == 3
    assert found.check(30, lambda: next(told)) is None
    assert found.agreed == 30
    assert str(found.check(31, lambda: "x")).startswith(
        "the step has become another one than was planned, at step 31: x"
    )


@pytest.mark.parametrize(("costs", "step"), [(0.02, 0.001), (3.0, 1.0), (0.5, 0.002)])
def test_audits_take_less_than_a_hundredth_of_the_time_and_get_rarer(
    costs: float, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(audits, "perf_counter", lambda: now)

    def difference() -> str:
        nonlocal now
        now += costs
        return ""

    found, at, number = Audits(3 * costs, 0), list[float](), 0
    while len(at) < 60:
        number += 1
        if found.ran >= found.due:
            assert found.check(number, difference) is None
            assert found.spent <= audits.SHARE * found.ran * (1 + 1e-9)
            assert found.agreed == number
            at.append(found.ran)
        found.ran += step if found.ran + step > found.due else max(step, (found.due - found.ran) // step * step)
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert gaps[0] == pytest.approx(100 * costs, abs=300 * costs + 2 * step)
    assert all(gap < (audits.RARER - 1) * end + 300 * costs + 3 * step for gap, end in zip(gaps, at, strict=False))
    assert gaps[-1] > 5 * gaps[5]


class Varied(nn.Module):
    """Much that a step may read, count, draw, write and leave behind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.dropout = nn.BatchNorm1d(32, momentum=None), nn.Dropout(0.3)
        self.scale, self.calls, self.seen = 0.9, 0, nn.Module()
        self.table: dict[str, Tensor] = {"mask": torch.rand(32)}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.dropout(torch.tanh(self.norm(self.one(x)))) * self.scale * self.table["mask"]
        self.left = hidden.mean()
        if torch.isfinite(hidden).all():
            hidden = hidden + 1
        return self.two(hidden)


def checked(out: Tensor, target: Tensor) -> Tensor:
    """A loss that reads its labels."""
    if (target > 2).any():
        out = out * 2
    return functional.l1_loss(out[torch.arange(len(out)), target], torch.zeros(len(out)))


@pytest.mark.parametrize(
    "make", [partial(AdamW, lr=1e-2), partial(SGD, lr=0.1, momentum=0.9), torch.optim.RMSprop, None]
)
def test_a_loop_with_all_that_may_change_is_never_stopped_and_shows_no_trace(make: Any, audited: list[int]) -> None:
    data = torch.randn(400, 32), torch.randint(0, 32, (400,))
    windows = [[each[start : start + rows] for each in data] for start, rows in ((0, 64), (64, 64), (9, 48), (200, 64))]
    loops = Loops(Varied(), make, checked, windows[0], **LIMITS)
    for number in range(24):
        for module in (loops.module, loops.twin):
            module.train(number % 5 != 3)
            module.scale = 0.9 - 0.01 * number if number > 8 else 0.9
            if number == 12:
                module.alias = module.table["mask"]  # a shorter way to a tensor that the step reads
            if number == 16:
                module.two.weight.requires_grad_(False)
        x, labels = windows[number % 4]
        given = x, labels % 3 if number % 6 == 5 else labels
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a batch of small labels takes another way
            loops.agree_on(*given, seed=number)
        for module in (loops.module, loops.twin):
            for parameter in module.parameters():
                parameter.grad = None
    if make is not None:
        loops.same()
    assert loops.module.calls == loops.twin.calls
    assert loops.module.left.equal(loops.twin.left)
    assert len(audited) > 15


def test_an_audit_takes_no_memory_beside_the_step(audited: list[int]) -> None:
    loops = Loops(net(64, 8), partial(SGD, lr=0.1), example=batch(512, 64), memory_ratio=0.6)
    data = batch(512, 64)
    for _ in range(2):
        loops.step(*data)
    before = len(audited)
    peak = window_peak(lambda: loops.step(*data))
    assert len(audited) == before + 1
    persistent = 4 * (sum(p.numel() for p in loops.module.parameters()) + sum(t.numel() for t in data))
    assert peak.peak_bytes + persistent == loops.step.report().planned_bytes
