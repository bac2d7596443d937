"""What operators' tensors must hold for their scratch, and calls that end their process."""

from __future__ import annotations

import pytest
import torch

from magis.cost.signature import parse
from magis.runtime import isolated_scratch as aside
from magis.runtime.isolated_scratch import measure_workspaces, measured_aside
from magis.runtime.scratch_in_context import Needs, needs

ADD = "aten.add_.Scalar(float32[64]{1}, 1)"
BAGS = "aten._embedding_bag.default(float32[50,8]{8,1}, int64[32]{1}, int64[4]{1}, False, 0, False, None, False, -1)"
ROW, BIAS, GATES = "float32[128,64,128]{8192,128,1}", "float32[512]{1}", "float32[512,128]{128,1}"
STATE = "float32[1,64,128]{8192,128,1}"
# a workspace of 64 bytes where the kernel takes 17 MB for granted: far beyond any memory that happens to lie there
DEADLY = (
    f"aten.mkldnn_rnn_layer_backward.default({ROW}, {GATES}, {GATES}, {BIAS}, {BIAS}, {STATE}, {STATE}, {ROW}, {STATE},"
    f" {STATE}, {ROW}, None, None, False, 2, 128, 1, True, True, False, [], False, uint8[64]{{1}})"
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("aten.mm.default(float32[64,64]{64,1}, float32[64,64]{1,64})", Needs.ANYTHING),
        ("aten.embedding.default(float32[50,8]{8,1}, int64[32]{1})", Needs.ANYTHING),
        ("aten.mul.Tensor(int64[8]{1}, int64[8]{1})", Needs.ANYTHING),
        (BAGS, Needs.NUMBERS),
        ("aten.prod.dim_int(float32[8,8]{8,1}, 1)", Needs.NUMBERS),
        (DEADLY, Needs.BYTES),
        ("mine.attend.default(float32[8]{1})", Needs.BYTES),
    ],
)
def test_needs(text: str, wanted: Needs) -> None:
    assert needs(*parse(text)) is wanted


def test_what_must_not_be_made_up_is_left_out() -> None:
    assert measure_workspaces([parse(DEADLY), parse(ADD)]) == {ADD: 12}


def test_a_call_that_ends_its_process_is_left_out_and_nothing_else() -> None:
    bad = "aten.mm.default(float32[2,3]{3,1}, float32[2,3]{3,1})"
    found = measured_aside([ADD, DEADLY, bad, BAGS])
    assert found.keys() == {ADD, BAGS}
    assert found[ADD] == 12


def test_a_call_that_never_comes_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "PATIENCE_SECONDS", 0.0)
    assert measured_aside([ADD]) == {}
    assert torch.ones(1).item() == 1.0
