"""The caching allocator under the settings of PYTORCH_ALLOC_CONF, against a plain reading of its rules."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.simulate.allocator_settings import allocator_settings
from magis.simulate.cuda_caching_allocator import FAR, CachingAllocator
from tests.plain_allocator import MIB, PlainAllocator, PlainSettings
from tests.strategies import examples

GIB = 1024 * MIB
EXPANDABLE = PlainSettings(expandable=True)
SETTINGS = {
    "": PlainSettings(),
    "expandable_segments:True": EXPANDABLE,
    "max_split_size_mb:20": PlainSettings(max_split=20 * MIB),
    "max_split_size_mb:128,max_non_split_rounding_mb:40": PlainSettings(max_split=128 * MIB, rounding=40 * MIB),
    "roundup_power2_divisions:4": PlainSettings(divisions=((0, 4),)),
    "roundup_power2_divisions:[16:8,32:1,64:2,>:4]": PlainSettings(
        divisions=((0, 8), (32 * MIB, 1), (64 * MIB, 2), (128 * MIB, 4))
    ),
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9": PlainSettings(threshold=0.6, fraction=0.9),
    "garbage_collection_threshold:0.6": PlainSettings(threshold=0.6),
    "large_segment_size_mb:32": PlainSettings(large=32 * MIB),
    "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:2": PlainSettings(
        expandable=True, max_split=64 * MIB, divisions=((0, 2),)
    ),
    "expandable_segments:True,large_segment_size_mb:12,per_process_memory_fraction:0.7": PlainSettings(
        expandable=True, large=12 * MIB, fraction=0.7
    ),
    "max_split_size_mb:32,garbage_collection_threshold:0.3,per_process_memory_fraction:0.8": PlainSettings(
        max_split=32 * MIB, threshold=0.3, fraction=0.8
    ),
}
Call = tuple[int, int]
"""Name, and bytes to allocate; a name in use is released instead."""


def compare(calls: list[Call], text: str, memory: int | None) -> CachingAllocator:
    """Replay calls on both, on a device with so much memory, and compare after each."""
    settings, plain_settings = allocator_settings(text), SETTINGS[text]
    allowed = None if memory is None else settings.allowed_bytes(memory)
    share = plain_settings.fraction
    assert allowed == (None if memory is None or share == 1 else int(share * memory))
    ours = CachingAllocator(settings, capacity=memory, allowed=allowed)
    plain = PlainAllocator(plain_settings, memory, allowed)
    held: set[int] = set()
    for name, nbytes in calls:
        if name in held:
            held.remove(name)
            ours.release(name)
            plain.release(name)
        elif nbytes:
            held.add(name)
            ours.allocate(name, nbytes)
            plain.allocate(name, nbytes)
            assert ours._taken[name][1].start == plain.place(name)
            assert ours.address(name) % FAR == plain.place(name)
        assert (ours.reserved, ours.allocated) == (plain.reserved, plain.allocated)
        assert (ours.retries, ours.failed) == (plain.retries, plain.failed)
        assert (ours.most_reserved, ours.most_allocated) == (plain.most_reserved, plain.most_allocated)
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    assert sum(signs[action] * size for action, _, size in ours.changes) == ours.reserved
    blocks = list(ours.blocks())
    assert sum(each.nbytes for each in blocks) == ours.reserved
    assert {each.name for each in blocks} - {None} == held
    assert all(one.address + one.nbytes <= other.address for one, other in pairwise(blocks))
    assert all(one.address + one.nbytes == other.address for one, other in pairwise(blocks) if not other.first)
    return ours


SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(MIB - 2048, MIB + 2048),
    st.integers(1, 160).map(lambda mib: mib * MIB),
    st.integers(9 * MIB, 41 * MIB),
    st.sampled_from([512, 2 * MIB - 512, 10 * MIB - 1, 19 * MIB - 1, 20 * MIB, 64 * MIB, 128 * MIB - 1]),
)
CALLS = st.lists(st.tuples(st.integers(0, 14), SIZES), max_size=60)
MEMORY = st.one_of(st.none(), st.integers(64, 900).map(lambda mib: mib * MIB))


@given(CALLS, st.sampled_from(sorted(SETTINGS)), MEMORY)
@examples(400)
def test_the_rules_are_those_of_a_plain_reading(calls: list[Call], text: str, memory: int | None) -> None:
    compare(calls, text, memory)


def test_memory_may_be_used_up_to_the_last_byte() -> None:
    for limits in ({"allowed": 22 * MIB}, {"capacity": 22 * MIB}):
        ours = CachingAllocator(**limits)
        ours.allocate(0, 1)
        ours.allocate(1, 2 * MIB)
        assert (ours.reserved, ours.retries, ours.failed) == (22 * MIB, 0, False)
        ours.allocate(2, 21 * MIB)
        assert (ours.retries, ours.failed) == (1, True)


def test_blocks_that_are_never_split_are_released_first() -> None:
    """Two blocks of exactly the size from which on they are not split; a small segment stays cached."""
    calls = [(0, 1), (1, 20 * MIB), (2, 20 * MIB), (0, 0), (1, 0), (2, 0), (3, 40 * MIB)]
    ours = compare(calls, "max_split_size_mb:20", 42 * MIB)
    assert (ours.reserved, ours.retries, ours.failed) == (42 * MIB, 1, False)
    assert compare(calls, "", 42 * MIB).reserved == 40 * MIB


def drawn(seed: int, count: int, live: int) -> list[Call]:
    """A trace of ``count`` allocations, of which about ``live`` are held at a time; last, all are released."""
    draw = random.Random(seed)
    scale = draw.choice([8, 30, 120])
    calls: list[Call] = []
    held: list[int] = []
    for name in range(count):
        kind = draw.random()
        if kind < 0.4:
            nbytes = draw.randrange(1, 2 * MIB)
        elif kind < 0.9:
            nbytes = int(draw.expovariate(1 / scale) * MIB) + 1
        else:
            nbytes = draw.choice([1, 2, 10, 20, 32, 64, 128]) * MIB + draw.choice([-512, 0, 1])
        calls.append((name, nbytes))
        held.append(name)
        while len(held) > live * draw.uniform(0.5, 1.1):
            calls.append((held.pop(draw.randrange(len(held))), 0))
        if draw.random() < 0.005:  # as between two steps
            calls += [(held.pop(), 0) for _ in range(len(held) * 3 // 4)]
    return calls + [(name, 0) for name in held]


@pytest.mark.parametrize("text", sorted(SETTINGS))
def test_long_traces_agree(text: str) -> None:
    peak = compare(calls := drawn(0, 500, 40), text, None).most_reserved
    tight = compare(calls, text, peak * 4 // 5)
    assert tight.most_reserved <= peak
    assert tight.allocated == 0


@pytest.mark.soak
@pytest.mark.parametrize("text", sorted(SETTINGS))
@pytest.mark.parametrize("seed", range(4))
def test_traces_of_ten_thousand_allocations_agree(text: str, seed: int) -> None:
    peak = compare(calls := drawn(seed, 10_000, 60), text, None).most_reserved
    for share in (1.0, 0.85, 0.7):
        compare(calls, text, int(share * peak))
