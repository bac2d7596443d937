"""Steps in turns: who runs when, whose clock ticks, what is executed, and what becomes of errors."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

from magis.runtime import time_slices as module
from magis.runtime import timing
from magis.runtime.time_slices import Step, TimeSlice, TimeSlices, Watched
from magis.runtime.timing import StoppingRule, in_turns, interleave, ratio_interval
from tests.nets import NETS
from tests.oracles import captured, graph_step


class Clock:
    """A clock that only the steps advance, in milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0
        self.log: list[str] = []
        monkeypatch.setattr(timing, "waits", dict)
        for each in (module, timing):
            monkeypatch.setattr(each.time, "perf_counter_ns", lambda: self.now_ms * 10**6)

    def step(self, name: str, operators: int, milliseconds: int) -> Step:
        """`operators` of so many milliseconds each."""

        def run(turn: TimeSlice) -> None:
            for _ in range(operators):
                self.log.append(name)
                self.now_ms += milliseconds
                turn()

        return run


def test_only_one_step_runs_and_only_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with TimeSlices(clock.step("a", 6, 1), clock.step("b", 5, 2), slice_ms=3) as turns:
        assert turns.pair(0) == (6.0, 10.0)
        # three operators of 1 ms use a slice of 3 ms up, two of 2 ms overrun it; a is done, b goes on alone
        assert "".join(clock.log) == "aaabbaaabbb"
        clock.log.clear()
        assert turns.pair(1) == (6.0, 10.0)
        # slices in the proportion of the steps, 2.25 and 3.75 ms: they end together
        assert "".join(clock.log) == "bbaaabbaaab"


def test_a_drifting_machine_does_not_move_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def step(operators: int) -> Step:
        def run(turn: TimeSlice) -> None:
            for _ in range(operators):
                clock.now_ms += 3 if clock.now_ms // 2500 % 2 else 1  # three times slower for 2.5 s, again and again
                turn()

        return run

    def whole(operators: int) -> Callable[[], object]:
        def run() -> None:
            for _ in range(operators):
                clock.now_ms += 3 if clock.now_ms // 2500 % 2 else 1

        return run

    ratio = ratio_interval(in_turns(step(700), step(770), StoppingRule(15, most=0), slice_ms=60))
    loose = ratio_interval(interleave(whole(700), whole(770), StoppingRule(15, most=0)))
    assert 1.05 < ratio.low <= ratio.ratio <= ratio.high < 1.15
    assert loose.high - loose.low > 3 * (ratio.high - ratio.low)


@pytest.mark.parametrize("leader", [0, 1])
@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_of_either_step_is_raised_and_ends_nothing_else(leader: int, broken: int) -> None:
    done = []

    def fine(turn: TimeSlice) -> None:
        for _ in range(20):
            turn()
        done.append(threading.current_thread())

    def wrong(turn: TimeSlice) -> None:
        turn()
        raise ZeroDivisionError

    steps = [fine, fine]
    steps[broken] = wrong
    with TimeSlices(steps[0], steps[1], slice_ms=0) as turns:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                turns.pair(leader)
    assert len(done) == 2
    assert not any(thread.name.startswith("magis-turns") for thread in threading.enumerate())


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
# an interrupt that strikes in a callback of a weak reference cannot be raised: the interpreter says so and goes on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_no_thread_behind() -> None:
    def step(turn: TimeSlice) -> None:
        for _ in range(20):
            sum(range(200))
            turn()

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    draw = random.Random(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            # the interpreter drops an interrupt that strikes in a callback: there is an end without one
            with suppress(KeyboardInterrupt), TimeSlices(step, step, slice_ms=0.01) as turns:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 4e-3))
                for _ in range(300):
                    turns.pair(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    until = time.monotonic() + 60  # that they end, and not how soon a busy machine lets them
    while (left := [each for each in threading.enumerate() if each.name == "magis-turns"]) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def losses(watch: Callable[[], Watched] | None) -> list[torch.Tensor]:
    """Loss and gradients of one step of eager mode."""
    model, batch = network(), torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    with watch() if watch is not None else torch.enable_grad():
        loss = model(batch).square().mean()
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_watched_eager_mode_computes_the_same_and_turns_in_forward_and_backward() -> None:
    made: list[TimeSlice] = []
    counts: list[int] = []

    class Counting(TimeSlice):
        def __call__(self, _gradients: object = None) -> None:
            counts[-1] += 1

    def watch() -> Watched:
        made.append(Counting(module._Baton(0), 0, 1e12))
        counts.append(0)
        return Watched(made[-1])

    plain, watched = losses(None), losses(watch)
    assert len(plain) == len(watched) == 7
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    # 7 calls forward and `backward` itself; at least one node of the backward pass for each of the seven
    assert counts[0] >= 15


def test_backward_passes_gradients_on_as_it_does_unwatched() -> None:
    """A gradient that nobody else holds is taken over as it is: watching must not make torch copy it."""
    taken: list[bool] = []
    made: list[int] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            gradient = gradients[0] * 2
            made.append(gradient.data_ptr())
            return gradient

    for watch in (None, Watched(TimeSlice(module._Baton(0), 0, 1e12))):
        weight = torch.ones(5, requires_grad=True)
        with watch if watch is not None else torch.enable_grad():
            Doubled.apply(weight).sum().backward()
        assert weight.grad is not None
        taken.append(weight.grad.data_ptr() == made[-1])
    assert taken == [True, True]


def test_generated_steps_turn_after_every_operator_and_compute_the_same() -> None:
    net = NETS["encoder-layer"].build()
    graph = captured(net).graph
    whole, turning = graph_step(graph, net), graph_step(graph, net)
    calls = []

    class Counting(TimeSlice):
        def __call__(self, _gradients: object = None) -> None:
            calls.append(1)

    for seed in range(2):
        for step in (whole, turning):
            torch.manual_seed(seed)
            step.prepare()
            turn = Counting(module._Baton(0), 0, 1e12)
            step.run() if step is whole else step.run_in_turns(turn)
        assert all(torch.equal(a, b) for a, b in zip(whole.results(), turning.results(), strict=True))
    theirs, ours = whole.module.state_dict(), turning.module.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    assert len(calls) >= 2 * len(graph.ops) * 0.9


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heaps")
def test_a_process_is_prepared_before_torch_and_keeps_what_the_user_says() -> None:
    program = (
        "import os, sys; from magis.quiet import before_torch; before_torch(); "
        "assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    for given, expected in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        if given is not None:
            environment["OMP_WAIT_POLICY"] = given
        run = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment
        )
        assert run.stdout.split() == [expected]
