"""Swaps beside the operators of a step: right in every legal order, and wrong as soon as one wait is missing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from magis.graph import Graph, parse, verify
from magis.runtime import swap_streams as streams
from magis.runtime.codegen import compile_step, generate
from magis.runtime.swap_streams import Stored, StreamHost, make_host
from tests.oracles import differences, eager_step, history, one_thread, same
from tests.runtime.simulated_gpu import SimulatedGpu, at_random, earliest_copies, latest_copies
from tests.runtime.swapping import plan, problem, recorded, swaps
from tests.strategies import examples, random_flags

ORDERS = {"late": latest_copies, "early": earliest_copies, **{f"random {n}": at_random(n) for n in range(3)}}
SWAPPED = ["encoder-layer", "batch-norm", "attention-dropout", "views"]


def check(gpu: SimulatedGpu) -> None:
    """No race, and the same contents of everything in any order."""
    assert gpu.races() == []
    assert [name for name, choose in ORDERS.items() if gpu.wrong(choose)] == []


@pytest.mark.parametrize("name", SWAPPED)
def test_everything_swapped_computes_eagers_numbers_in_every_order(name: str) -> None:
    with one_thread():
        net, _ = problem(name)
        graph = plan(name)
        assert swaps(graph) > 2
        gpu, found, _step = recorded(graph, net)
        assert differences(_eager(name), found) == []
        check(gpu)


@pytest.mark.parametrize("name", ["attention-dropout", "batch-norm"])
@given(seed=st.integers(0, 2**32 - 1))
@examples(8)
def test_any_plan_computes_eagers_numbers_in_every_order(name: str, seed: int) -> None:
    with one_thread():
        net, compiled = problem(name)
        flags = random_flags(compiled.problem, np.random.default_rng(seed))
        gpu, found, _step = recorded(plan(name, flags), net)
        assert differences(_eager(name), found) == []
        check(gpu)


@functools.cache
def _eager(name: str) -> list[dict[str, Tensor]]:
    return history(eager_step(problem(name)[0]), 2)


# --- one wait less ------------------------------------------------------------------------------------------------


class NoReady(StreamHost):
    def ready(self, tensor: Tensor) -> None:
        """The consumer does not wait."""


class NoWait(StreamHost):
    def wait(self, tensor: Tensor, stored: Stored) -> None:
        """Memory is freed while it is copied."""


class NoOrder(StreamHost):
    """Copies start before what was computed earlier."""

    def _orders(self, stream: streams.Stream) -> bool:
        return False

    def _copy(self, stream: streams.Stream, target: Tensor, source: Tensor) -> object:
        if self._orders(stream):
            return super()._copy(stream, target, source)
        with self._runtime.running_on(stream):
            target.copy_(source, non_blocking=True)
        self._last[stream] = stream.record_event()
        return self._last[stream]


class EarlyStore(NoOrder):
    """Stores alone start too early."""

    def _orders(self, stream: streams.Stream) -> bool:
        return stream == self._loads


class EarlyLoad(NoOrder):
    """Loads alone start too early."""

    def _orders(self, stream: streams.Stream) -> bool:
        return stream == self._stores


@contextmanager
def spoilt(host: type[StreamHost]) -> Iterator[None]:
    """Steps made inside swap with another host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "StreamHost", host)
        yield


@pytest.mark.parametrize("host", [NoReady, NoWait, EarlyStore, EarlyLoad])
def test_one_wait_less_is_a_race_and_gives_wrong_numbers(host: type[StreamHost]) -> None:
    name = "attention-dropout"  # no indices: rubbish would crash kernels
    with one_thread(), spoilt(host):
        gpu, found, _step = recorded(plan(name), problem(name)[0])
        assert differences(_eager(name), found) == []  # in the order in which a CPU runs them, all is well
        assert gpu.races() != []
        assert [order for order, choose in ORDERS.items() if gpu.wrong(choose)] != []


class NoHold(StreamHost):
    """Loads do not hold what they are loaded from."""

    def load(self, stored: Stored) -> Tensor:
        tensor = super().load(stored)
        event, _ = self._arriving[id(tensor)]
        self._arriving[id(tensor)] = event, Stored.of(tensor, None)
        return tensor


@pytest.mark.parametrize(("host", "racing"), [(StreamHost, False), (NoHold, True)])
def test_a_buffer_is_used_again_when_its_load_is_waited_for(host: type[StreamHost], racing: bool) -> None:
    """Loaded ahead of its use: a store that comes before the use gets another buffer, one behind it the same."""
    gpu = SimulatedGpu()
    swapping = host("cpu", gpu)
    with gpu:
        first = torch.arange(64.0)
        parked = swapping.store(first)
        swapping.wait(first, parked)
        del first
        back = swapping.load(parked)
        del parked
        second = torch.arange(64.0, 128.0)
        again = swapping.store(second)
        swapping.wait(second, again)
        del second
        assert gpu.pinned_bytes == ([256] if racing else [256, 256])
        swapping.ready(back)
        result = back + 1
        swapping.store(result)
    assert gpu.pinned_bytes == [256, 256]
    assert bool(gpu.races()) == racing
    if not racing:
        check(gpu)
    assert same(result, torch.arange(64.0) + 1)


# --- buffers, streams, broken steps ---------------------------------------------------------------------------------


def test_a_broken_step_leaves_no_copy_behind() -> None:
    """What it held is freed: the compute stream waits for copies that may still touch it."""
    graph = prefetched()
    gpu = SimulatedGpu()

    def broken(_tensor: Tensor) -> Tensor:
        raise RuntimeError("out of order")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten.exp.default, "_op", broken)
        step = compile_step(graph, host=make_host("cpu", gpu))
    with gpu:
        with pytest.raises(RuntimeError, match="out of order"):
            step([torch.ones(4)], {})
        later = torch.ones(4)
    assert gpu.races() == []
    assert later.sum() == 4
    waited = [action.awaits for action in gpu.actions if action.stream == 0 and action.awaits is not None]
    stores, loads = (
        [action.records for action in gpu.actions if action.stream == stream and action.records is not None]
        for stream in (1, 2)
    )
    assert stores[-1] in waited  # by the step
    assert waited[-1] == loads[-1]


# --- the generated code ---------------------------------------------------------------------------------------------

PREFETCHED = """magis graph 1
storage 1 batch 16
storage 2 temporary 16
storage 3 host 16
storage 4 temporary 16
storage 5 temporary 16
storage 6 temporary 16
value 1 @1 float32 [4] {1} +0 "input:0"
value 2 @2 float32 [4] {1} +0
value 3 @3 float32 [4] {1} +0
value 4 @4 float32 [4] {1} +0
value 5 @5 float32 [4] {1} +0
value 6 @4 float32 [2, 2] {2, 1} +0
value 7 @6 float32 [2, 2] {2, 1} +0
input 1
op 0 %2 = aten.neg.default(%1) reads 1:0 phase forward
op 1 %3 = magis.store(%2) reads 2:0 phase forward
op 2 = magis.wait(%2, %3) phase forward
op 3 %4 = magis.load(%3) phase forward
op 4 %5 = aten.exp.default(%1) reads 1:0 phase forward
op 5 %6 = aten.view.default(%4, [2, 2]) phase forward
op 6 %7 = aten.neg.default(%6) reads 4:0 phase forward
output 5
output 7
"""


def prefetched() -> Graph:
    graph = parse(PREFETCHED)
    verify(graph)
    return graph


def lines(graph: Graph) -> list[str]:
    return [line.strip() for line in generate(graph).splitlines() if not line.strip().startswith("#")]


def test_the_first_operator_that_takes_what_was_loaded_waits_for_it() -> None:
    found = lines(prefetched())
    assert found.count("host.ready(v4)") == 1
    assert found.index("host.ready(v4)") == found.index("v6 = f2(v4, [2, 2])  # aten.view.default") - 1


def test_parts_of_a_loop_are_swapped_as_well() -> None:
    graph = parse("""magis graph 1
storage 1 batch 64
storage 2 temporary 64
value 1 @1 float32 [16] {1} +0 "input:0"
value 2 @2 float32 [16] {1} +0
input 1
op 0 (%2) = magis.loop(%1) reads 1:0 phase forward parts 4
  storage 1 outer 64
  storage 2 outer 64
  storage 3 temporary 16
  storage 4 temporary 16
  storage 5 host 16
  storage 6 temporary 16
  storage 7 temporary 16
  value 1 @1 float32 [16] {1} +0
  value 2 @2 float32 [16] {1} +0
  value 3 @1 float32 [4] {1} +0
  value 4 @4 float32 [4] {1} +0
  value 5 @5 float32 [4] {1} +0
  value 6 @6 float32 [4] {1} +0
  value 7 @7 float32 [4] {1} +0
  input 1
  input 2
  op 0 %3 = magis.part(%1, 0) phase forward
  op 1 %4 = aten.exp.default(%3) reads 1:0 phase forward
  op 2 %5 = magis.store(%4) reads 4:0 phase forward
  op 3 = magis.wait(%4, %5) phase forward
  op 4 %6 = magis.load(%5) phase forward
  op 5 %7 = aten.neg.default(%6) reads 6:0 phase forward
  op 6 = magis.join(%2, %7, 0) reads 2:0 7:0 writes 2:1 phase forward
  end
output 2
""")
    verify(graph)
    gpu = SimulatedGpu()
    tensor = torch.arange(16.0)
    with gpu:
        (found,) = compile_step(graph, host=make_host("cpu", gpu))([tensor], {})
    assert same(found, -tensor.exp())
    assert len([action for action in gpu.actions if action.stream != 0 and action.run is not None]) == 8
    assert gpu.pinned_bytes == [16]
    check(gpu)
