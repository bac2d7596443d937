"""--magis-dtype: the data type that models are run in; each has baselines of its own."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("Float32", "float32"),
        ("BF16", "bfloat16"),
        ("int8", ""),
        ("bfloat", "bfloat16"),
        ("amp_bfloat16", "amp-bfloat16"),
        ("TF32", "tf32"),
    ],
)
def test_a_slip_of_the_hand_is_told_the_nearest_type(gate, given, meant):
    message = gate.refuses("--magis-models=bert", f"--magis-dtype={given}")
    assert (f"did you mean {meant}" in message) == bool(meant)
    assert "choose from float32, tf32" in message


@pytest.mark.parametrize(
    ("dtype", "item_size"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("amp-bfloat16", 4), ("amp-float16", 4)]
)
def test_memory_is_counted_in_items_of_that_type(gate, dtype, item_size):
    gate("--magis-models=bert", f"--magis-dtype={dtype}")
    for row in gate.rows():
        assert row["dtype"] == dtype
        assert float(row["opt-memory"]) == int(row["opt peak bytes"]) / item_size
        assert float(row["ori-simul-memory"]) == int(row["ori peak bytes"]) / item_size
