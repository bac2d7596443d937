"""Streams, evaluator and time line agree on how long a step with swaps takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.cost.machines import Machine, Times
from magis.simulate.evaluator import evaluate
from magis.simulate.problem import KEEP, SWAP
from magis.simulate.timeline import elapsed_ns
from tests.oracles import one_thread
from tests.runtime.simulated_gpu import SimulatedGpu
from tests.runtime.swapping import OPERATOR_NS, Costs, plan, problem, recorded
from tests.strategies import examples


def streams_ns(gpu: SimulatedGpu, times: Times) -> int:
    """When the compute stream is done with what the generated code gave to the streams: each does it in order, and
    waits for nothing but events."""
    clocks, occurred = [0] * gpu.streams, dict[int | None, int]()
    for action in gpu.actions:
        start = max(clocks[action.stream], occurred.get(action.awaits, 0))
        spent = 0
        if action.what.startswith("aten.") and "empty_strided" not in action.what:  # memory for a load
            (written,) = action.writes if action.stream else (0,)
            nbytes = len(gpu.memories[written]) if written else 0
            spent = times.copy_ns + math.ceil(nbytes * (1e9 / times.link_bytes_per_s)) if written else OPERATOR_NS
        clocks[action.stream] = start + spent
        if action.records is not None:
            occurred[action.records] = clocks[action.stream]
    return clocks[0]


@pytest.mark.parametrize("name", ["encoder-layer", "batch-norm", "views"])
@given(seed=st.integers(0, 2**32 - 1))
@examples(5)
def test_streams_take_as_long_as_evaluator_and_time_line_say(name: str, seed: int) -> None:
    """Nobody waits on the link that the plan was made for; on a slower one all wait for the same copies."""
    with one_thread():
        net, compiled = problem(name)
        flags = np.random.default_rng(seed).choice([KEEP, SWAP, SWAP], compiled.problem.n_storages).astype(np.int8)
        gpu, _, _step = recorded(plan(name, flags), net, 1)
        order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
        found = evaluate(compiled.problem, order, flags)
        assert streams_ns(gpu, Costs()) == found.latency_ns == elapsed_ns(plan(name, flags), Costs())
        slow = Machine(Costs(), link=0.001)
        late = streams_ns(gpu, slow)
        assert late == elapsed_ns(plan(name, flags), slow)
        assert late > found.latency_ns or found.swaps < 4
