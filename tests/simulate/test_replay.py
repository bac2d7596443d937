"""The exact simulator against a count of every storage at every operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.graph import Graph, Op, Ref, Storage, Value
from magis.simulate.simulator import replay, rounded
from tests.graph.loop_graphs import sound
from tests.oracles import lives, no_scratch
from tests.strategies import schedules


def scratch(op: Op, values: Mapping[int, Value]) -> int:
    return 7 * (op.id % 3)


def counted(graph: Graph, at: int, *, deaths: dict[int, int] | None, rounding: int, held: frozenset[int]) -> int:
    """Bytes of tensors during operator ``at``, storage by storage."""
    total = 0
    for storage in graph.storages.values():
        blocks = (storage.nbytes + rounding - 1) // rounding * rounding
        if storage.persistent:
            total += blocks
        elif storage.kind == "temporary":
            alive = lives(graph, deaths, storage.id)
            if alive and (storage.id in held or at in alive):
                total += blocks
    return total


@given(schedules(12), st.sampled_from([1, 1, 16, 512]), st.data())
def test_bytes_are_counted_storage_by_storage(graph: Graph, rounding: int, data: st.DataObject) -> None:
    some = st.sets(st.sampled_from(sorted(graph.storages)), max_size=4)
    held = frozenset(data.draw(some))
    deaths = None
    if data.draw(st.booleans()):
        deaths = {storage: data.draw(st.integers(0, len(graph.ops))) for storage in data.draw(some)}
    spans = st.tuples(st.integers(0, len(graph.ops)), st.integers(0, len(graph.ops))).map(sorted).map(tuple)
    numbers = tuple((*span, 2**size) for size, span in enumerate(data.draw(st.lists(spans, max_size=3))))
    profile = replay(graph, scratch, deaths=deaths, rounding=rounding, held=held, numbers=numbers)
    assert profile.persistent_bytes == sum(
        rounded(storage.nbytes, rounding) for storage in graph.storages.values() if storage.persistent
    )
    assert len(profile.tensors) == len(profile.peaks) == len(graph.ops)
    for at, op in enumerate(graph.ops):
        tensors = counted(graph, at, deaths=deaths, rounding=rounding, held=held)
        alive = sum(nbytes for born, last, nbytes in numbers if born <= at <= last)
        assert profile.tensors[at] == tensors
        assert profile.peaks[at] == tensors + alive + scratch(op, graph.values)
    assert profile.tensor_bytes == max(profile.tensors, default=profile.persistent_bytes)
    assert profile.peak_bytes == max(profile.peaks, default=profile.persistent_bytes)
    if graph.ops:
        assert profile.peak_position == profile.peaks.index(profile.peak_bytes)


def chain() -> Graph:
    """w (9 B) -> a (101 B) -> b (41 B), a view of b, a copy of b on the host; the view is returned."""
    storages = {
        n: Storage(n, nbytes, kind)
        for n, nbytes, kind in ((1, 9, "parameter"), (2, 101, "temporary"), (3, 41, "temporary"), (4, 41, "host"))
    }
    values = {
        n: Value(n, (nbytes,), (1,), "int8", s)
        for n, nbytes, s in ((1, 9, 1), (2, 101, 2), (3, 41, 3), (4, 41, 3), (5, 41, 4))
    }
    ops = (
        Op(0, "make.a", (Ref(1),), (), (2,)),
        Op(1, "make.b", (Ref(2),), (), (3,)),
        Op(2, "view.b", (Ref(3),), (), (4,)),
        Op(3, "magis.store", (Ref(3),), (), (5,)),
        Op(4, "use.w", (Ref(1),), (), ()),
    )
    return Graph(storages, values, ops, (1,), (4,))


def test_a_chain_by_hand() -> None:
    workspace: Callable[[Op], int] = {0: 0, 1: 5, 2: 0, 3: 0, 4: 99}.get  # type: ignore[assignment]
    profile = replay(chain(), lambda op, values: workspace(op.id))
    assert profile.persistent_bytes == 9
    assert profile.tensors == (110, 151, 50, 50, 50)
    assert profile.peaks == (110, 156, 50, 50, 149)
    assert (profile.peak_bytes, profile.peak_position, profile.tensor_bytes) == (156, 1, 151)


@pytest.mark.parametrize(("rounding", "inside", "scratch"), [(1, (16 + 8, 8), 50), (32, (32 + 32, 32), 100)])
def test_a_loop_in_a_loop_takes_what_one_part_takes(rounding: int, inside: tuple[int, int], scratch: int) -> None:
    """At the worst moment of each: the inner sum without scratch, the inner reduction with it."""
    profile = replay(sound(), lambda op, _: scratch * (op.target == "magis.reduce"), rounding=rounding)
    around = {1: 112 + 16 + 24 + 48 + 8, 32: 128 + 32 + 32 + 64 + 32}[rounding]
    assert profile.tensors == (around + inside[0], {1: 168, 32: 224}[rounding])
    assert profile.peaks == (around + inside[1] + scratch, profile.tensors[1])


def test_the_first_of_equal_peaks_is_named() -> None:
    profile = replay(chain(), lambda op, values: 153 - replay(chain(), no_scratch).tensors[op.id])
    assert profile.peak_position == 0


def test_a_step_without_operators_is_what_persists() -> None:
    profile = replay(Graph({1: Storage(1, 10, "buffer")}, {}, (), (), ()), no_scratch, rounding=8)
    assert (profile.peak_bytes, profile.tensor_bytes, profile.persistent_bytes) == (16, 16, 16)
    assert profile.peak_position == -1


@pytest.mark.parametrize(
    ("nbytes", "rounding", "expected"), [(0, 512, 0), (1, 512, 512), (512, 512, 512), (513, 512, 1024), (7, 1, 7)]
)
def test_allocators_hand_out_whole_blocks(nbytes: int, rounding: int, expected: int) -> None:
    assert rounded(nbytes, rounding) == expected
