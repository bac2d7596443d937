"""Optimizer state in host memory between updates: `magis.optimize(..., host_limit=...)`."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from magis import estimate, fit, optimize, pareto
from magis.api import run_case
from magis.errors import PartialUpdateError, UsageError
from magis.models.step_parts import recipe_of
from magis.results import Case
from magis.runtime.measure import window_peak
from magis.runtime.swap_streams import is_on_host
from tests.training.loops import Loops, batch, loss_of, net
from tests.training.test_errors import RaisesAt, contents

OPTIMIZERS = {
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "adam": partial(Adam, lr=1e-2, weight_decay=0.1),
    "amsgrad": partial(AdamW, lr=1e-2, amsgrad=True),
    "foreach": partial(AdamW, lr=1e-2, foreach=True),
    "groups": lambda parameters: _groups([*parameters]),
}
ROOM = 1.02
"""A limit, as a multiple of what weights, their gradients and a batch take."""


def _groups(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW([{"params": parameters[:4], "lr": 1e-2}, {"params": parameters[4:], "lr": 1e-3}])


def loops(name: str, **how: Any) -> Loops:
    """A step whose limit is below the bytes of its weights and its optimizer's state."""
    module = net(64, 6)
    weights = 4 * sum(each.numel() for each in module.parameters())
    states = {"momentum": 1, "amsgrad": 3}.get(name, 2)
    limit = int(weights * (1.3 + 0.4 * states)) + 32_000
    assert limit < weights * (1 + states) or states == 1
    return Loops(
        module,
        OPTIMIZERS[name],
        example=batch(16, 64),
        memory_ratio=None,
        memory_limit=limit,
        host_limit="1 GiB",
        **how,
    )


class RaisesOnce(RaisesAt):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left < 0:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def persistent(made: Loops) -> int:
    state = [t for held in made.optimizer.state.values() for t in held.values() if torch.is_tensor(t) and t.dim()]
    counted = [each for each in state if not is_on_host(each, "cpu")]
    data = batch(16, 64)
    return sum(each.nbytes for each in (*made.module.parameters(), *counted, *data))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_trains_as_in_eager_mode_below_its_persistent_bytes(name: str, tmp_path: Path) -> None:
    made = loops(name)
    report = made.step.report()
    assert report.host_bytes > 0
    assert f"on the host  {report.host_bytes / 1024:.2f} KiB of optimizer state" in str(report)
    made.agree(20, rows=16, width=64)
    data = batch(16, 64)
    peak = window_peak(lambda: made.step(*data)).peak_bytes + persistent(made)
    made.eager(*data)
    assert peak == report.planned_bytes <= (report.limit_bytes or 0)
    moved = [t for held in made.optimizer.state.values() for t in held.values() if t.dim() and is_on_host(t, "cpu")]
    assert sum(each.nbytes for each in moved) == report.host_bytes
    # a checkpoint, other shapes, and a plan from a file
    for optimizer in (made.optimizer, made.other):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    made.agree(2, rows=16, width=64)
    made.agree(2, rows=8, width=64)
    made.agree(1, rows=16, width=64)
    made.step.save(tmp_path / "plan")
    module = copy.deepcopy(made.twin)
    optimizer = OPTIMIZERS[name](module.parameters())
    optimizer.load_state_dict(copy.deepcopy(made.other.state_dict()))
    limit = report.limit_bytes
    again = optimize(
        module, batch(16, 64), loss_of, optimizer, memory_limit=limit, host_limit="1 GiB", plan=tmp_path / "plan"
    )
    assert again.report().host_bytes > 0
    assert torch.equal(again(*batch(16, 64)), made.eager(*batch(16, 64)))
    assert all(map(torch.equal, module.parameters(), made.twin.parameters()))


def test_less_host_memory_than_that_is_kept() -> None:
    made = loops("adam")
    whole = made.step.report().host_bytes
    some = Loops(
        net(64, 6), OPTIMIZERS["adam"], example=batch(16, 64), memory_ratio=None,
        memory_limit=made.step.report().limit_bytes, host_limit=whole,
    )  # fmt: skip
    assert 0 < some.step.report().host_bytes <= whole
    with pytest.raises(UsageError, match="no plan found that needs at most"):
        Loops(
            net(64, 6), OPTIMIZERS["adam"], example=batch(16, 64), memory_ratio=None,
            memory_limit=made.step.report().limit_bytes, host_limit=0,
        )  # fmt: skip


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_error_anywhere_in_the_step_loses_nothing(error: type[BaseException]) -> None:
    """Either nothing has changed, or the error names what has, and loading a checkpoint mends it."""
    made = loops("adam")
    data = batch(16, 64)
    made.agree(2, rows=16, width=64)
    held = copy.deepcopy((made.module.state_dict(), made.optimizer.state_dict()))
    whole = torn = at = 0
    while True:
        before = copy.deepcopy(contents(made.module, made.optimizer))
        try:
            with RaisesOnce(error, at):
                made.step(*data)
            break
        except error:
            after = contents(made.module, made.optimizer)
            assert before.keys() == after.keys()
            assert all(torch.equal(each, after[name]) for name, each in before.items())
            whole += 1
        except PartialUpdateError:
            torn += 1
        made.module.load_state_dict(held[0])
        made.optimizer.load_state_dict(held[1])
        at += 7
    assert whole > 0
    assert torn > 0
    made.eager(*data)
    made.same()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host_limit": "8 G"}, "not an amount of memory: '8 G'"),
        ({"host_limit": -1}, 'host_limit=-1; use an amount, such as "64 GiB", or 0'),
        ({"host_limit": "1 GiB", "compile": True}, "host_limit='1 GiB' for compile=True; its state"),
    ],
)
def test_a_mistake_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        optimize(net(), batch(), loss_of, None, memory_ratio=0.9, **arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def step_of(width: int = 64) -> tuple[Any, ...]:
    module = net(width, 6)
    return module, batch(16, width), loss_of, AdamW(module.parameters())


def persistent_bytes(width: int = 64) -> int:
    return 3 * sum(each.nbytes for each in net(width, 6).parameters())


def test_a_case_of_the_gate_keeps_a_limit_below_weights_and_state() -> None:
    limit = persistent_bytes() * 2 // 3
    case = Case("steps:net", "magis", "cpu", "small", memory_limit=limit, host_limit=persistent_bytes())
    gated = run_case(case, make=recipe_of("test", *step_of())[1])
    assert gated.numbers == "bit-identical"
    assert gated.optimized.measured == gated.optimized.simulated
    assert gated.memory.peak_bytes <= limit
    assert gated.search.swapped_bytes >= persistent_bytes() - limit


def test_fit_finds_sizes_with_moved_state_alone() -> None:
    limit = persistent_bytes() * 2 // 3
    found = [fit(*step_of(), memory_limit=limit, device="cpu", most=16, budget=300, host_limit=h) for h in (0, "1 GiB")]
    assert (found[0].eager, found[0].magis, found[1].eager) == (None, None, None)
    assert found[1].magis is not None
    assert found[1].magis.peak_bytes <= limit


def test_fronts_reach_below_weights_and_state() -> None:
    kept, moved = (
        pareto(*step_of(), device="sim:rtx3090", budget=100, points=4, host_limit=each) for each in (0, 10**9)
    )
    assert moved.points[0].peak_bytes < persistent_bytes() < kept.points[0].peak_bytes
    assert moved.lower_bound_bytes < kept.lower_bound_bytes
    assert moved.points[-1].latency_ms <= kept.points[-1].latency_ms


def test_an_estimate_names_what_moved_state_would_need() -> None:
    limit = persistent_bytes(1024) * 3 // 4
    told = {each.name: each for each in estimate(*step_of(1024), device="sim:rtx3090", memory_limit=limit).remedies}
    assert not told["magis"].fits
    assert told["magis and host"].fits
    assert "--magis-host-limit=" in told["magis and host"].how
