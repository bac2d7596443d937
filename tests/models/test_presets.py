"""The preset "small", on real eager steps: sizes at which a memory ratio means something (issue bars)."""

from __future__ import annotations

import math

import pytest

from benchmarks.preset_sizes import measure
from magis.extensions.models.network_names import GATE_NAMES, SEED_NAMES


def test_the_measurement_itself() -> None:
    # a linear layer 4 -> 2 over 3 rows: 10 weights, 18 numbers of batch, SGD without state
    sizes = measure("tests.models.factories:as_tuple", rounds=1)
    assert sizes.parameters == 10
    assert sizes.gradient_bytes == 40
    assert sizes.persistent_bytes == 40 + 3 * 4 * 4 + 3 * 2 * 4
    # the forward's largest operator makes the output; the backward of the loss reads a gradient of one number and
    # the output and makes a gradient as large as the output (24 bytes each)
    assert 24 + 24 + 4 <= sizes.working_set_bytes < 200
    assert sizes.persistent_bytes + 24 + 40 <= sizes.peak_bytes < 400
    assert sizes.random_bytes == 0
    assert sizes.fixed_ratio == (112 + 40) / sizes.peak_bytes


@pytest.mark.parametrize("name", [*GATE_NAMES, "gpt", *SEED_NAMES])
def test_small_sizes_keep_the_bars(name: str) -> None:
    sizes = measure(name, rounds=20, enough_ms=500)
    assert sizes.fixed_ratio <= 0.25
    assert sizes.lower_bound_ratio <= 0.5
    # random operators cannot be recomputed as they are: enough must remain for a ratio of 0.6
    assert sizes.fixed_ratio + sizes.random_ratio <= 0.3
    assert all(math.isfinite(loss) for loss in sizes.losses)
    assert sizes.losses[-1] < sizes.losses[0]


@pytest.mark.parametrize("name", ["mlp", "vgg11", "densenet121", "seed-resnet152", "wide_resnet50_2"])
def test_the_other_networks_learn_as_well(name: str) -> None:
    sizes = measure(name, rounds=20, enough_ms=500)
    assert sizes.fixed_ratio <= 0.25
    assert all(math.isfinite(loss) for loss in sizes.losses)
