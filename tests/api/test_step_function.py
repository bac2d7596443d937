"""`magis.estimate(step, batch)`: step functions of training loops, against what the allocator hands out."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from inspect import getclosurevars
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magis
from magis.capture import whole_steps
from magis.capture.contents import copies
from magis.errors import CaptureError, MagisError, UsageError
from magis.frontends import step_function
from tests.api import own_loops
from tests.api.own_loops import (
    LOOPS,
    Loop,
    Trainer,
    batch,
    carried_over,
    evaluated,
    every_third,
    in_cycles,
    logged,
    measured,
    nested_phases,
    net,
)  # fmt: skip

F = nn.functional


@pytest.mark.parametrize("make", LOOPS)
def test_the_estimate_is_what_the_loop_needs(make: Callable[[], Loop]) -> None:
    step, given = make()
    found = magis.estimate(step, given, device="cpu")
    assert found.peak_bytes == measured(make)
    assert sum(found.by_kind.values()) == found.at_peak.tensor_bytes <= found.peak_bytes


@pytest.mark.parametrize("make", LOOPS)
def test_calls_on_real_tensors_are_those_on_placeholders(
    make: Callable[[], Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, given = make()
    found = magis.estimate(step, given, device="cpu")
    on_copies = partial(whole_steps._recorded, twins=copies)
    record = lambda step, *of: on_copies(whole_steps._Reached(step), step, *of[:2])  # noqa: E731
    monkeypatch.setattr(step_function, "record_whole_step", record)
    real = magis.estimate(step, given, device="cpu")
    assert (real.peak_bytes, real.by_kind) == (found.peak_bytes, found.by_kind)


def test_the_peak_of_each_phase_is_what_it_needs() -> None:
    step, given = evaluated()
    found = magis.estimate(step, given, device="cpu")
    assert found.phases == {name: measured(evaluated, phase=name) for name in ("training", "evaluation")}
    assert found.phases["evaluation"] < found.phases["training"] == found.peak_bytes
    assert "\nby phase: training " in str(found)


def test_a_phase_begins_with_what_is_alive() -> None:
    step, given = nested_phases()
    found = magis.estimate(step, given, device="cpu")
    names = ("training", "forward", "logging", "backward")
    assert found.phases == {name: measured(nested_phases, phase=name) for name in names}


def test_reference_cycles_are_told() -> None:
    def step(given: tuple[Tensor, Tensor]) -> None:
        now: dict[str, Any] = {"output": model(given[0])}
        now["itself"] = now
        F.mse_loss(now["output"], given[1])

    model, given, *_ = plain()
    found = magis.estimate(step, given, device="cpu")
    with magis.peak("cpu") as p:
        step(given)
    assert found.cyclic_bytes == p.kept_bytes > 0
    assert f"each call leaves {found.cyclic_bytes / 1024:.2f} KiB more in reference cycles" in str(found)
    assert magis.estimate(*in_cycles(), device="cpu").cyclic_bytes == 4 * 256 * 32  # the output, without its graph


ROWS = (64, 256, 16, 192)


def by_turns() -> Loop:
    """A batch of another size in each call, copied for it; the last output is held until the next one is there."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    last: Any = None
    count = 0

    def step(given: tuple[Tensor, Tensor]) -> None:
        nonlocal last
        optimizer.zero_grad()
        last = model(given[0])
        F.mse_loss(last, given[1]).backward()
        optimizer.step()

    def turn(given: list[tuple[Tensor, Tensor]]) -> None:
        nonlocal count
        count += 1
        step((given[(count - 1) % 4][0].clone(), given[(count - 1) % 4][1].clone()))

    turn.of_a_batch = step  # type: ignore[attr-defined]
    return turn, [batch(rows) for rows in ROWS]


def test_several_batches() -> None:
    loop, given = by_turns()
    held = sum(each.nbytes for pair in given for each in pair)
    found = magis.estimate(loop.of_a_batch, batches=given, device="cpu")  # type: ignore[attr-defined]
    assert found.peak_bytes == measured(by_turns, calls=12, cycle=4) - held
    assert [each.shapes for each in found.batches] == [f"[{rows}, 32], [{rows}, 32]" for rows in ROWS]
    assert max(found.batches, key=lambda each: each.peak_bytes).number == 1
    assert found.batches[1].peak_bytes == found.peak_bytes
    assert "batch 2 of [256, 32], [256, 32]: peak " in str(found)
    assert str(found).count("sets the peak") == 1
    assert found.worst_first_bytes is None
    with pytest.raises(UsageError, match="there are 4 batches"):
        found.largest_batch()


def test_several_batches_of_a_module() -> None:
    model, given, optimizer, (step, _) = plain()
    parts = magis.estimate(model, given, F.mse_loss, optimizer, device="cpu")
    (one,) = magis.estimate(model, batches=[given], loss=F.mse_loss, optimizer=optimizer, device="cpu").batches
    assert one.peak_bytes == parts.peak_bytes
    several = [batch(rows) for rows in ROWS]
    found = magis.estimate(model, batches=several, loss=F.mse_loss, optimizer="adamw", device="cpu")
    assert found.batches == magis.estimate(step, batches=several, device="cpu").batches
    assert str(found).startswith("Sequential on cpu, float32: peak ")
    with pytest.raises(UsageError, match="several batches need an update"):
        magis.estimate(model, batches=several, loss=F.mse_loss, optimizer="none", device="cpu")


def test_less_stays_reserved_with_the_worst_batch_first() -> None:
    _, _, _, (step, _) = plain()
    given = [batch(rows) for rows in (22_000, 26_000, 31_000, 37_000, 45_000)]
    found = magis.estimate(step, batches=given, device="sim:h100")
    other = magis.estimate(step, batches=given[::-1], device="sim:h100")
    assert found.worst_first_bytes == other.reserved_bytes == other.worst_first_bytes
    assert found.reserved_bytes is not None
    assert other.reserved_bytes is not None
    assert found.peak_bytes < other.reserved_bytes < 0.7 * found.reserved_bytes
    assert found.peak_bytes == other.peak_bytes
    assert "with the worst batch first" in str(found)


def plain() -> tuple[nn.Module, Any, torch.optim.Optimizer, Loop]:
    model, given = net(), batch()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(given: tuple[Tensor, Tensor]) -> None:
        loss = F.mse_loss(model(given[0]), given[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, given, optimizer, (step, given)


@pytest.mark.parametrize("device", ["cpu", "sim:h100"])
def test_it_is_the_estimate_of_its_parts(device: str) -> None:
    model, given, optimizer, (step, _) = plain()
    parts = magis.estimate(model, given, F.mse_loss, optimizer, device=device)
    whole = magis.estimate(step, given, device=device)
    assert (whole.peak_bytes, whole.latency_ms) == (parts.peak_bytes, parts.latency_ms)
    assert (whole.by_kind, whole.limit_bytes) == (parts.by_kind, parts.limit_bytes)
    assert (whole.reserved_bytes is None) == (device == "cpu")
    assert str(whole).startswith(f"step on {device}, float32: peak ")
    assert whole.remedies == ()


def test_micro_batches_by_hand() -> None:
    model, given, optimizer, _ = plain()

    def step(given: tuple[Tensor, Tensor]) -> None:
        for _ in range(3):
            loss = F.mse_loss(model(given[0]), given[1]) / 3
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    parts = magis.estimate(model, given, F.mse_loss, optimizer, device="cpu", accumulate=3)
    assert magis.estimate(step, given, device="cpu").peak_bytes == parts.peak_bytes


def test_everything_is_as_before() -> None:
    loop = Trainer()
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    given = batch()

    def step(given: tuple[Tensor, Tensor]) -> None:
        loop.step(given)
        scheduler.step()

    step(given)
    weights, state = copy.deepcopy(loop.model.state_dict()), copy.deepcopy(loop.optimizer.state_dict())
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    random = torch.get_rng_state()
    magis.estimate(step, given, device="cpu")
    assert all(torch.equal(now, weights[name]) for name, now in loop.model.state_dict().items())
    now = loop.optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    assert all(torch.equal(now["state"][n][k], v) for n, each in state["state"].items() for k, v in each.items())
    assert (loop.calls, scheduler.last_epoch) == (1, 1)
    assert all(
        parameter.grad is not None and bool((parameter.grad == 1).all()) for parameter in loop.model.parameters()
    )
    assert torch.equal(random, torch.get_rng_state())
    step(given)
    assert loop.calls == 2


def test_closure_variables_are_as_before() -> None:
    for make, name in ((carried_over, "last"), (every_third, "count"), (logged, "history")):
        step, given = make()
        before = getclosurevars(step).nonlocals[name]
        magis.estimate(step, given, device="cpu")
        after = getclosurevars(step).nonlocals[name]
        assert after is before or after == before
        assert after in (None, 0, [])


def test_a_closure_variable_that_a_call_makes_is_gone_again() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> None:
        nonlocal last
        last = net(inputs).square().mean()
        last.backward()
        optimizer.step()
        optimizer.zero_grad()

    last = torch.empty(0)
    del last
    magis.estimate(step, torch.randn(8, 4), device="cpu")
    with pytest.raises(ValueError, match="empty"):
        _ = [cell.cell_contents for cell in step.__closure__ or ()]


def test_the_largest_batch() -> None:
    *_, (step, given) = plain()
    limit = magis.estimate(step, given, device="cpu").peak_bytes
    found = magis.estimate(step, tuple(each[:16] for each in given), device="cpu", memory_limit=limit)
    assert found.largest_batch() == 256


MODEL = net()
UPDATE = torch.optim.SGD(MODEL.parameters(), lr=0.1)
HIDDEN = {"model": net()}


def of_globals(given: tuple[Tensor, Tensor]) -> None:
    F.mse_loss(MODEL(given[0]), given[1]).backward()
    UPDATE.step()
    UPDATE.zero_grad()


def test_globals_are_found() -> None:
    found = magis.estimate(of_globals, batch(), device="cpu")
    assert found.by_kind["parameter"] == sum(each.nbytes for each in MODEL.parameters())
    assert all(each.grad is None for each in MODEL.parameters())


def test_what_is_refused() -> None:
    model, given, optimizer, (step, _) = plain()
    losses: list[Tensor] = []

    def leaks(given: tuple[Tensor, Tensor]) -> None:
        losses.append(F.mse_loss(model(given[0]), given[1]))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()

    def breaks(given: tuple[Tensor, Tensor]) -> None:
        model(given[0]) @ given[1]

    def changes(given: tuple[Tensor, Tensor]) -> None:
        rows = len(losses) + 1
        losses.append(torch.empty(0))
        model(given[0][:rows]).sum().backward()

    def idle(_given: tuple[Tensor, Tensor]) -> None:
        pass

    searching = torch.optim.LBFGS(model.parameters())

    def searches(given: tuple[Tensor, Tensor]) -> None:
        def closure() -> float:
            searching.zero_grad()
            loss = F.mse_loss(model(given[0]), given[1])
            loss.backward()
            return float(loss.detach())

        searching.step(closure)

    refusals: list[tuple[Any, dict[str, Any], type[MagisError], str]] = [
        (leaks, {}, CaptureError, "each call of the step leaves .* more in memory"),
        (breaks, {}, CaptureError, "RuntimeError .*mat1 and mat2"),
        (changes, {}, CaptureError, "go on differing"),
        (idle, {}, UsageError, "runs no operator"),
        (searches, {}, CaptureError, "LBFGS.step runs forward and backward as often as numbers say"),
        (step, {"accumulate": 2}, UsageError, "a step function brings its loss and update"),
        (step, {"compiled": True}, UsageError, "a step function brings its loss and update"),
        (step, {"optimizer": optimizer}, UsageError, "a step function brings its loss and update"),
        (step, {"device": "sim:nothing"}, UsageError, "unknown device"),
        (step, {"batches": [given]}, UsageError, "there are both batch and batches; give a module or a step function"),
    ]
    for function, more, kind, said in refusals:
        with pytest.raises(kind, match=said) as refused:
            magis.estimate(function, given, **{"device": "cpu", **more})
        assert "\n" not in str(refused.value)
    assert losses == []
    assert optimizer.state == {}


def test_what_no_name_leads_to_is_refused() -> None:
    model, given, _, (step, _) = plain()
    hidden = torch.optim.SGD(model.parameters(), lr=0.1)
    number = id(hidden)

    def elsewhere(given: tuple[Tensor, Tensor]) -> None:
        F.mse_loss(model(given[0]), given[1]).backward()
        next(each for each in gc.get_objects() if id(each) == number).step()

    cases = [
        (elsewhere, "the step calls an optimizer, SGD, that was not found"),
        (torch.compile(step), "the step calls code of torch.compile"),
        (
            partial(lambda network, given: network(given[0]), torch.compile(model)),
            "the step calls code of torch.compile",
        ),
    ]
    for function, said in cases:
        with pytest.raises(CaptureError, match=said):
            magis.estimate(function, given, device="cpu")
    assert hidden.state == {}


def test_names_in_other_modules_are_found() -> None:
    def step(given: tuple[Tensor, Tensor]) -> None:
        F.mse_loss(own_loops.SHARED(given[0]), given[1]).backward()
        own_loops.SHARED.zero_grad()

    found = magis.estimate(step, batch(), device="cpu")
    assert found.by_kind["parameter"] == sum(each.nbytes for each in own_loops.SHARED.parameters())


def test_activations_leave_a_simulated_gpu() -> None:
    model, given, optimizer, (step, _) = plain()

    def saves(given: tuple[Tensor, Tensor]) -> None:
        with torch.autograd.graph.save_on_cpu():
            loss = F.mse_loss(model(given[0]), given[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    plainly, saved = (magis.estimate(each, given, device="sim:h100") for each in (step, saves))
    assert saved.by_kind["activation"] < plainly.by_kind["activation"] / 4
    assert saved.peak_bytes < plainly.peak_bytes
    assert magis.estimate(saves, given, device="cpu").peak_bytes == magis.estimate(step, given, device="cpu").peak_bytes


def test_a_long_step_is_called_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, (step, given) = plain()
    calls = 0

    def counted(given: tuple[Tensor, Tensor]) -> None:
        step(given)
        told()

    def told() -> None:
        nonlocal calls
        calls += 1

    whole = magis.estimate(counted, given, device="cpu")
    monkeypatch.setattr("magis.capture.whole_steps.MOST_OPERATORS", 1)
    seen: list[int] = []
    record = step_function.record_whole_step

    def recorded(*of: Any) -> Any:
        found = record(*of)
        seen.append(len(found.begins) - 1)
        return found

    monkeypatch.setattr(step_function, "record_whole_step", recorded)
    assert magis.estimate(counted, given, device="cpu").peak_bytes == whole.peak_bytes
    assert (seen, calls) == ([4], 0)
