"""Halo rows in generated code: what is taken, what is added, and which loops are sound."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from magis.graph import Graph, dump, parse, verify
from magis.graph.verify import problems
from magis.runtime.codegen import add_rows, compile_step, take_rows
from magis.runtime.measure import tensor_peak, window_peak
from magis.simulate.simulator import replay
from tests.oracles import same
from tests.runtime.loop_graphs import Looks, pointwise, row_by_row

ROWS, PARTS = 12, 4


def negated(before: int, after: int, dim: int = 0, parts: int = PARTS) -> Graph:
    """Stretches with rows around them are negated, and added where they were taken from."""
    whole = Looks((ROWS, 5) if dim == 0 else (5, ROWS))
    return pointwise(whole, dim, parts, view=False, around=(before, after)).graph


def times_taken(before: int, after: int, parts: int = PARTS) -> Tensor:
    """How many parts take each row."""
    size = ROWS // parts
    return sum(
        (torch.arange(ROWS) >= i * size - before) & (torch.arange(ROWS) < (i + 1) * size + after) for i in range(parts)
    ) + torch.zeros(ROWS)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 4, 12])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (0, 1), (2, 0), (3, 5), (7, 20)])
def test_rows_are_taken_and_added(
    before: int, after: int, dim: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halos of several parts and larger than the whole; results begin as memory that holds anything."""
    graph = negated(before, after, dim, parts)
    verify(graph)
    assert parse(dump(graph)) == graph
    empty = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: empty(*args, **kwargs).fill_(77))
    x = torch.randint(-4, 5, (ROWS, 5) if dim == 0 else (5, ROWS)).float()
    kept = x.clone()
    (found,) = compile_step(graph)([x], {})
    expected = 0.0 - (x if dim == 0 else x.T) * times_taken(before, after, parts)[:, None]
    assert same(found, expected if dim == 0 else expected.T.contiguous())
    assert same(x, kept)


@pytest.mark.parametrize("stride", [(20, 5, 1), (5, 20, 1), (1, 4, 12)])
def test_a_stretch_has_zeros_outside_of_the_whole_whatever_its_layout(stride: tuple[int, ...]) -> None:
    whole = torch.randn(4, 3, 5)
    for first in range(-4, 4):
        shape = (4, 6, 5)
        order = sorted(range(3), key=lambda dim: -stride[dim])
        dense = row_by_row([shape[dim] for dim in order])
        laid = tuple(dense[order.index(dim)] for dim in range(3))
        low, high = max(first, 0), min(first + 6, 3)
        if low >= high:
            continue
        found = take_rows(whole, 1, first, shape, laid)
        assert found.stride() == laid
        assert same(found.contiguous(), pad(whole[:, low:high], (0, 0, low - first, first + 6 - high)))
        total = torch.full_like(whole, 7)
        add_rows(total, 1, first, found, clear=True)
        add_rows(total, 1, first, found, clear=False)
        kept = torch.zeros_like(whole)
        kept[:, low:high] = whole[:, low:high]
        assert same(total, 2 * kept)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (0, 2), (7, 5)])
def test_simulated_bytes_are_measured_bytes(before: int, after: int) -> None:
    graph = negated(before, after)
    inputs = [torch.randn(ROWS, 5)]
    step = compile_step(graph)
    step(inputs, {})
    expected = replay(graph, lambda op, values: 0)
    assert window_peak(lambda: step(inputs, {})).peak_bytes + graph.persistent_bytes() == expected.peak_bytes
    assert tensor_peak(lambda: step(inputs, {})) + graph.persistent_bytes() == expected.tensor_bytes


# --- rules ------------------------------------------------------------------------------------------------------------

PIECE = "float32(6, 5) is not one of 4 stretches of float32(12, 5) along 0"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("magis.part(%1, 0, 1, 2)", "magis.part(%1, 0, 1)", "needs a tensor and a dimension, makes one tensor"),
        ("magis.part(%1, 0, 1, 2)", "magis.part(%1, 0, -1, 4)", "needs a tensor and a dimension, makes one tensor"),
        ("magis.part(%1, 0, 1, 2)", "magis.part(%1, 0, True, 2)", "needs a tensor and a dimension, makes one tensor"),
        ("magis.part(%1, 0, 1, 2)", "magis.part(%1, 0, 0, 0)", "needs a tensor and a dimension, makes one tensor"),
        ("magis.part(%1, 0, 1, 2)", "magis.part(%1, 0, 1, 1)", f"{PIECE} with 2 rows around it"),
        ("magis.part(%1, 0, 1, 2)", "magis.part(%1, 0)", PIECE),
        ("magis.part(%1, 0, 1, 2)", "magis.part(%1, 2, 1, 2)", "dimension 2 of a tensor with 2"),
        ("magis.join(%2, %4, 0, 1, 2)", "magis.join(%2, %4, 0, 3)", "needs the whole, the part, and how to merge them"),
        ("magis.join(%2, %4, 0, 1, 2)", "magis.join(%2, %4, 0, 2, 2)", f"{PIECE} with 4 rows around it"),
        ("magis.join(%2, %4, 0, 1, 2)", "magis.join(%2, %4, 0)", PIECE),
        ("magis.join(%2, %4, 0, 1, 2)", 'magis.reduce(%2, %4, "sum", 1, 2)', "merges by 'sum', which is no dimension"),
        ("value 3 @3 float32 [6, 5]", "value 3 @1 float32 [6, 5]", "a stretch with rows around it is a copy"),
    ],
)
def test_rules(old: str, new: str, problem: str) -> None:
    text = dump(negated(1, 2))
    assert old in text
    found = list(problems(parse(text.replace(old, new))))
    assert any(problem in line for line in found), found
