"""Random regions of the networks: what loops compute is what the whole operators do, in the bytes that were said."""

from __future__ import annotations

import pytest

from magis.fission.proof import verify_fission
from magis.graph import verify
from tests.fission.cutout import check_same, loops
from tests.fission.draws import NETWORKS, drawn, nested

MIB = 1 << 20
QUICK = 2
PER_BATCH = 24
BATCHES = 6


def check_seed(name: str, seed: int, most_bytes: int, *, uneven: bool = False) -> int:
    """One fission of a network; with an odd seed nested, if its body can be split. Returns the number of loops."""
    inside = seed % 2 == 1
    fission = drawn(name, seed, most_bytes=most_bytes, uneven=uneven and not inside)
    fission = (nested(fission, seed, uneven=uneven) if inside else None) or fission
    verify(fission.looped)
    verify_fission(fission.looped, fission.graph)
    whole, looped = fission.pair
    verify(whole)
    check_same(whole, looped, seed)
    return len(loops(fission.looped))


@pytest.mark.parametrize("name", NETWORKS)
def test_regions_compute_the_same_in_the_bytes_said(name: str) -> None:
    found = [check_seed(name, seed, 8 * MIB) for seed in range(QUICK)]
    assert len(found) == QUICK


@pytest.mark.parametrize("name", NETWORKS)
def test_regions_with_a_smaller_last_part_compute_the_same_in_the_bytes_said(name: str) -> None:
    for seed in range(QUICK):
        check_seed(name, seed, 8 * MIB, uneven=True)


@pytest.mark.soak
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("name", NETWORKS)
def test_many_regions_compute_the_same_in_the_bytes_said(name: str, batch: int) -> None:
    """Together 2,016, about half of them nested."""
    found = [check_seed(name, 1000 + batch * PER_BATCH + at, 48 * MIB) for at in range(PER_BATCH)]
    assert found.count(2) >= PER_BATCH // 6
