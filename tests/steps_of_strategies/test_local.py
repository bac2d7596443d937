"""Strategies of one rank: what their names stand for, and that the steps are what PyTorch users would write."""

from __future__ import annotations

import copy

import pytest
import torch

from magis.capture.workload import Workload, fake_tensors
from magis.errors import UsageError
from magis.runtime.steps import EagerStep
from magis.strategies.single_device import Local, local, window_of_compiled
from tests.api.nets import blocks


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("amp", "cpu", Local("amp", "cpu", cast="bfloat16")),
        ("amp", "cuda", Local("amp", "cuda", cast="float16")),
        ("amp-float16", "cpu", Local("amp-float16", "cpu", cast="float16")),
        ("checkpoint", "cpu", Local("checkpoint", "cpu", blocks="checkpoint")),
        ("offload+amp-bfloat16", "cuda", Local("offload+amp-bfloat16", "cuda", cast="bfloat16", offloads=True)),
        (
            "amp+selective-checkpoint+compile-budget",
            "cpu",
            Local(
                "amp+selective-checkpoint+compile-budget",
                "cpu",
                cast="bfloat16",
                blocks="selective-checkpoint",
                compiled="compile-budget",
            ),
        ),
    ],
)
def test_a_name_is_made_of_parts(name: str, device: str, expected: Local) -> None:
    assert local(name, device) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("amp+amp-float16", "amp and amp-float16 exclude each other; use one of them"),
        ("checkpoint+amp+selective-checkpoint", "checkpoint and selective-checkpoint exclude each other"),
        ("compile+compile-budget", "compile and compile-budget exclude each other"),
        ("amp+amp", "amp and amp exclude each other"),
        ("amp+ddt", "unknown part 'ddt'; combine amp,"),
    ],
)
def test_names_that_make_no_sense_are_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(UsageError, match="strategy") as caught:
        local(name, "cpu")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def small() -> Workload:
    torch.manual_seed(0)
    return blocks()


def losses(step: EagerStep) -> list[float]:
    found = []
    for index in range(3):
        torch.manual_seed(index)
        step.prepare()
        found.append(float(step.run()))
    return found


def steps_of(name: str) -> list[float]:
    work, strategy = small(), local(name, "cpu")
    with strategy.wrapped(work.module, work.blocks):
        return losses(strategy.step(work))


@pytest.mark.parametrize("name", ["checkpoint", "selective-checkpoint", "offload", "selective-checkpoint+offload"])
def test_what_only_moves_or_recomputes_keeps_every_number(name: str) -> None:
    assert local(name, "cpu").keeps_numbers
    work = small()
    expected = losses(EagerStep(*work.parts))
    assert steps_of(name) == expected


def by_hand(cast: torch.dtype, scaler: torch.amp.GradScaler | None) -> list[float]:
    """As PyTorch's own examples of mixed precision write it."""
    work = small()
    optimizer = torch.optim.AdamW(work.module.parameters(), weight_decay=0.01, foreach=False)
    found = []
    for index in range(3):
        torch.manual_seed(index)
        optimizer.zero_grad()
        with torch.autocast("cpu", cast):
            loss = work.loss_fn(work.module(*work.inputs), *work.targets)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(float(loss.detach()))
    return found


def test_mixed_precision_is_autocast_and_with_float16_a_scaler() -> None:
    assert steps_of("amp") == by_hand(torch.bfloat16, None)
    assert steps_of("amp-float16") == by_hand(torch.float16, torch.amp.GradScaler("cpu"))
    assert steps_of("amp") != steps_of("amp-float16")


def test_a_step_whose_gradients_overflow_is_left_out() -> None:
    work = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # float16 ends at 65504
    strategy = local("amp-float16", "cpu")
    step = EagerStep(*work.parts, around=strategy.around, scaler=scaler)
    before = copy.deepcopy(work.module.state_dict())
    step.prepare()
    step.run()
    assert all(torch.equal(value, before[name]) for name, value in work.module.state_dict().items())
    assert scaler.get_scale() < 2.0**40


def test_what_is_kept_on_the_host_is_counted_where_it_is_another_memory() -> None:
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with fake_tensors():
        work = small()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            work.loss_fn(work.module(*work.inputs), *work.targets)
        with local("offload", "cuda").in_capture(work, "cuda") as moved:
            loss = work.loss_fn(work.module(*work.inputs), *work.targets)
            assert moved.nbytes == sum(kept)
            loss.backward()
        assert moved.nbytes == 2 * sum(kept)
        with local("offload", "cpu").in_capture(work, "cpu") as moved:
            work.loss_fn(work.module(*work.inputs), *work.targets)
        assert moved.nbytes == 0


def test_a_budget_keeps_less_of_compiled_code() -> None:
    whole = window_of_compiled(local("compile", "cpu"), small())
    less = window_of_compiled(local("compile-budget", "cpu"), small())
    gradients = sum(p.nbytes for p in small().module.parameters())
    assert gradients < less < 0.9 * whole
