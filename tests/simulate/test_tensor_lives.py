"""Every tensor of a step with its birth and its death: their bytes are those that the simulator counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

import pytest

from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.graph import Graph, Op, Value
from magis.graph.hazards import is_pure_view
from magis.results import TensorLives
from magis.simulate import tensor_lives as module
from magis.simulate.peak_breakdown import live_storages, module_table
from magis.simulate.simulator import replay
from magis.simulate.tensor_lives import tensor_lives
from magis.simulate.timeline import elapsed_ns
from tests.graph.loop_graphs import sound
from tests.nets import NETS
from tests.oracles import captured, no_scratch

COSTS = RooflineCosts(find_device("sim:h100"), None, {})


def alive(lives: TensorLives, at: int) -> Counter[tuple[str, str]]:
    """Bytes by kind and module during a call."""
    found: Counter[tuple[str, str]] = Counter()
    for number, nbytes in enumerate(lives.nbytes):
        if lives.born[number] <= at <= lives.dies[number]:
            found[lives.words[lives.kind[number]], lives.words[lives.module[number]]] += nbytes
    return found


def totals(lives: TensorLives) -> list[int]:
    change = [0] * (len(lives.run) + 1)
    for born, dies, nbytes in zip(lives.born, lives.dies, lives.nbytes, strict=True):
        change[born] += nbytes
        change[dies + 1] -= nbytes
    return list(accumulate(change))[:-1]


def scratch(op: Op, values: Mapping[int, Value]) -> int:
    return 0 if is_pure_view(values, op) else 7 * len(op.inputs())


@pytest.mark.parametrize("name", ["encoder-layer", "tied", "inplace-dropout", "batch-norm", "conv-inplace"])
def test_bytes_are_those_of_the_simulator_at_every_call(name: str) -> None:
    step = captured(NETS[name].build())
    graph, deaths = step.graph, step.deaths
    profile = replay(graph, scratch, deaths=deaths)
    lives = tensor_lives(graph, COSTS, scratch, profile, deaths=deaths)
    runs = [at for at, op in enumerate(graph.ops) if not is_pure_view(graph.values, op)]
    assert [graph.ops[at].target for at in runs] == [lives.words[lives.calls[call][0]] for call in lives.run]
    assert totals(lives) == [profile.tensors[at] for at in runs]
    assert lives.scratch == tuple(profile.peaks[at] - profile.tensors[at] for at in runs)
    assert lives.ends[-1] == elapsed_ns(graph, COSTS)
    for number in range(0, len(runs), 7):
        rows = module_table(live_storages(graph, runs[number], no_scratch, deaths=deaths))
        assert alive(lives, number) == {(row.kind, row.module): row.nbytes for row in rows}


def expected(graph: Graph) -> list[str]:
    """Operators in the order in which they run, those of loops in each part."""
    found: list[str] = []
    for op in graph.ops:
        if op.body is not None:
            found += op.body.parts * expected(op.body.graph)
        elif not is_pure_view(graph.values, op):
            found.append(op.target)
    return found


def test_parts_of_loops_run_one_after_the_other() -> None:
    graph = sound()
    profile = replay(graph, no_scratch)
    lives = tensor_lives(graph, COSTS, no_scratch, profile)
    names = [lives.words[lives.calls[call][0]] for call in lives.run]
    assert names == expected(graph)
    assert len(names) > len(graph.ops)
    assert max(totals(lives)) == profile.tensor_bytes
    assert lives.ends[-1] == elapsed_ns(graph, COSTS)


def test_a_loop_with_too_many_calls_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CALLS", 3)
    graph = sound()
    profile = replay(graph, no_scratch)
    lives = tensor_lives(graph, COSTS, no_scratch, profile)
    assert [lives.words[lives.calls[call][0]] for call in lives.run].count("magis.loop") == 1
    assert max(held + beside for held, beside in zip(totals(lives), lives.scratch, strict=True)) == profile.peak_bytes
    assert lives.ends[-1] == elapsed_ns(graph, COSTS)
