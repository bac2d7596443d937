"""Lives of storages and values, against definitions read off word by word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magis.graph import Graph
from magis.graph.hazards import last_uses, lifetimes
from tests.nets import NETS
from tests.oracles import captured
from tests.strategies import schedules


def touching(graph: Graph, storage: int) -> list[int]:
    return [
        at
        for at, op in enumerate(graph.ops)
        if any(graph.values[value].storage == storage for value in (*op.inputs(), *op.made()))
    ]


@given(schedules(14))
def test_a_storage_lives_from_its_first_to_its_last_touch(graph: Graph) -> None:
    lives = lifetimes(graph)
    returned = {graph.values[value].storage for value in graph.outputs}
    for storage in graph.storages.values():
        touched = touching(graph, storage.id)
        if storage.kind not in ("temporary", "host") or not touched:
            assert storage.id not in lives.born
            assert storage.id not in lives.dies
        else:
            assert lives.born[storage.id] == touched[0]
            assert lives.dies[storage.id] == (len(graph.ops) if storage.id in returned else touched[-1])


@given(schedules(14), st.data())
def test_eagers_own_lives_come_first(graph: Graph, data: st.DataObject) -> None:
    plain = lifetimes(graph)
    deaths = {
        storage: data.draw(st.integers(0, len(graph.ops)))
        for storage in data.draw(st.sets(st.sampled_from(sorted(graph.storages)), max_size=6))
    }
    lives = lifetimes(graph, deaths)
    returned = {graph.values[value].storage for value in graph.outputs}
    assert lives.born == plain.born
    for storage, born in plain.born.items():
        if storage in returned or storage not in deaths:
            assert lives.dies[storage] == len(graph.ops)
        else:  # freed after that many operators, the one that made it included
            assert lives.dies[storage] == max(born, deaths[storage] - 1)


@given(schedules(14))
def test_a_value_is_forgotten_with_its_last_use(graph: Graph) -> None:
    forgotten = last_uses(graph)
    assert len(forgotten) == len(graph.ops)
    kept = {*graph.inputs, *graph.outputs}
    expected: list[list[int]] = [[] for _ in graph.ops]
    for value in graph.values:
        uses = [at for at, op in enumerate(graph.ops) if value in op.inputs() or value in op.made()]
        if uses and value not in kept:
            expected[uses[-1]].append(value)
    assert [list(values) for values in forgotten] == expected


def test_a_real_step_forgets_everything_but_its_loss() -> None:
    graph = captured(NETS["batch-norm"].build()).graph
    made = {value for op in graph.ops for value in op.made()}
    assert {value for values in last_uses(graph) for value in values} == made - set(graph.outputs)
