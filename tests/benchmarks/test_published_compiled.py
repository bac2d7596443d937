"""The compiled set of published figures: its rows and sources, its networks, and what a figure counts."""

from __future__ import annotations

import re
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import magis
from benchmarks.lib.published_compiled import PLACES, ROWS, counted, decoder, found, source
from benchmarks.lib.published_compiled_models import LitDecoder, TimmVit, TuneDecoder
from benchmarks.lib.published_second import RESERVED
from magis.capture.workload import fake_tensors
from magis.units import MIB


def test_every_row_says_where_when_and_on_what() -> None:
    assert len(ROWS) >= 15
    assert len({row.place for row in ROWS}) >= 3
    for row in ROWS:
        assert re.fullmatch(r"github\.com/\S+.* 202\d-\d\d-\d\d: \S.*, .*torch.*", source(row)), source(row)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_networks_have_the_parameters_of_those_that_were_measured() -> None:
    with fake_tensors():
        assert parameters(LitDecoder(40, 4096, 5120, 13824, 40, 32000, 1.0, neox=False)) == 13_015_864_320
        assert parameters(TuneDecoder(28, 4096, 3072, 8192, 24, 8, 128256)) == 3_212_749_824
        assert round(parameters(TimmVit(32, 1280, 16, 5120)) / 1e6) == 631
        assert round(parameters(TimmVit(40, 1536, 24, 8192, swiglu=True)) / 1e7) == 113


@pytest.mark.parametrize("place", PLACES)
def test_a_figure_counts_what_its_place_prints(place: str) -> None:
    row = next(row for row in ROWS if row.place == place)
    kinds = {"parameter": 30 * MIB, "batch": 10 * MIB, "activation": 60 * MIB}
    estimate: Any = SimpleNamespace(peak_bytes=100 * MIB, reserved_bytes=130 * MIB, by_kind=kinds)
    of = PLACES[place]
    own = 130 if of.counts == RESERVED else 60 if of.above_inputs else 100
    assert counted(row, estimate) == own * MIB + 2 * of.workspace_bytes


def test_logits_that_a_loop_holds_are_counted() -> None:
    def small() -> Any:
        return decoder(32, 2, 1, 64, 128, 2, 4096, 0.5, neox=True)

    logits = 2 * 32 * 4096 * 2
    found = magis.estimate(small, device="sim:h100", compiled=True)
    assert found.by_kind["activation"] + found.by_kind["gradient"] >= 3 * logits


@pytest.mark.soak
def test_the_bar() -> None:
    assert statistics.median(abs(found(index).error) for index in range(len(ROWS))) <= 0.08
