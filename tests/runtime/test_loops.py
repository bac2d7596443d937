"""Loops as generated code: what it computes, and the memory that it takes while it does."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from magis.fission.candidates import connected, grow
from magis.fission.expand import expand
from magis.fission.region import Region
from magis.graph import Graph, parse, verify
from magis.rewrite.functionalize import functionalize, untangle
from magis.runtime.codegen import compile_step, generate
from magis.runtime.measure import tensor_peak, window_peak
from magis.simulate.simulator import replay
from tests.golden.golden import HERE, before_and_after, check_golden
from tests.graph.loop_graphs import sound
from tests.nets import OPTIMIZERS, Net, rows
from tests.oracles import captured, same, workspaces
from tests.runtime.loop_graphs import COPIES, REDUCTIONS, VIEWS, Written, nested, reduction

COPIED = r"p\d+ = empty\("
"""How generated code copies a stretch of a tensor."""
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}
"""How far a mean of means may be from the mean, relative to numbers of size 4."""


def run(graph: Graph, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return compile_step(graph)(tensors, {})


def close(found: Tensor, expected: Tensor) -> bool:
    bound = CLOSE.get(found.dtype, 0)
    return torch.allclose(found, expected, rtol=bound, atol=bound)


def check(written: Written, *, exact: bool = True) -> None:
    """The loop's graph is sound, and computes what plain torch does; inputs stay as they were.

    Results begin as memory that holds anything: poisoned here.
    """
    made = []

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        made.append(torch.empty(0).new_empty_strided(*args, **kwargs).fill_(77))  # type: ignore[arg-type]
        return made[-1]

    verify(written.graph)
    inputs = written.inputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_strided", poisoned)
        found = run(written.graph, inputs)
    assert len(made) >= len(found)
    for tensor, expected, value in zip(found, written.expected(*inputs), written.graph.outputs, strict=True):
        looks = written.graph.values[value]
        assert (tuple(tensor.shape), tensor.stride()) == (looks.shape, looks.stride)
        assert same(tensor, expected) if exact else close(tensor, expected)
    assert all(same(left, right) for left, right in zip(inputs, written.inputs(), strict=True))


@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_stretches_as_they_lie(number: int) -> None:
    check(VIEWS[number])
    assert not re.findall(COPIED, generate(VIEWS[number].graph))


def test_a_loop_that_writes_its_input_stretch_by_stretch() -> None:
    x, m = torch.randn(4, 6), torch.randn(4)
    halved = m * 0.5
    negated, summed = run(sound(), [x, m])
    assert torch.allclose(negated, -x.exp().sum(1))
    assert torch.allclose(summed, x.exp().sum(0))
    assert same(m, halved)


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize(("how", "call"), [("max", "amax"), ("min", "amin")])
def test_extremes_are_those_of_the_whole(how: str, call: str, row: int) -> None:
    """No neutral element: infinities of the other sign win where all are; a not-a-number in any part wins always."""
    graph = reduction(how, f"aten.{call}.default(%3, [0])", 4, 2, "float32", torch.clone).graph
    x = torch.full((4, 6), -torch.inf if how == "max" else torch.inf)
    x[row, 1] = torch.nan
    x[row, 2] = 5.0
    (found,) = run(graph, [x])
    expected = x.amax(0) if how == "max" else x.amin(0)
    assert same(found, expected)
    assert torch.isnan(found).tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_adds_its_parts_in_order(dtype: str) -> None:
    """The order is pinned, bit for bit: the first part copied, then one after another added; bfloat16 in float32."""
    graph = reduction("sum", "aten.sum.dim_IntList(%3, [0])", 12, 6, dtype, torch.clone).graph
    x = torch.randn(12, 6).to(getattr(torch, dtype))
    total = x[:2].sum(0).float()
    for part in range(1, 6):
        total = total + x[2 * part : 2 * part + 2].sum(0)
    assert same(run(graph, [x])[0], total)


# --- memory -----------------------------------------------------------------------------------------------------------


def simulated(graph: Graph) -> tuple[int, int]:
    """Peak bytes and tensor bytes by the exact simulator, with workspaces measured in isolation."""
    profile = replay(graph, workspaces().of(graph))
    return profile.peak_bytes, profile.tensor_bytes


def really(graph: Graph, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """The same by the allocator's count."""
    step = compile_step(graph)
    step(tensors, {})
    peak = window_peak(lambda: step(tensors, {})).peak_bytes
    return peak + graph.persistent_bytes(), tensor_peak(lambda: step(tensors, {})) + graph.persistent_bytes()


MEASURED = [
    *VIEWS,
    *COPIES,
    *(written for name, written in REDUCTIONS.items() if name.endswith("-6-3-float32")),
    nested(),
]


@pytest.fixture(scope="module")
def _learned() -> None:
    """Scratch of all operators, measured at once."""
    workspaces().learn(*(written.graph for written in MEASURED))


@pytest.mark.usefixtures("_learned")
@pytest.mark.parametrize("written", MEASURED)
def test_simulated_bytes_are_measured_bytes(written: Written) -> None:
    assert simulated(written.graph) == really(written.graph, written.inputs())


def test_a_loop_in_a_loop_holds_what_both_hold() -> None:
    graph = nested().graph
    inputs, results = 480 + 40, 160 + 96 + 4
    outer = 240 + 40 + 48  # abs; the largest of each row; the sums
    inner = 80 + 40  # the stretch; its largest
    innermost = 16 + 16 + 16  # sums of one; the stretch; its sum
    assert simulated(graph) == (inputs + results + outer + 80 + innermost,) * 2
    assert inner < 80 + innermost


# --- a region of a network --------------------------------------------------------------------------------------------

LEARNER = Net(
    lambda: nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2)), rows(6, 4),
    loss_fn=lambda output: output.pow(2).sum(), rule=OPTIMIZERS["gradients"],
)  # fmt: skip


def learner() -> tuple[Graph, Graph]:
    """A step of forward and backward, and the same in three parts along the batch."""
    graph = untangle(functionalize(captured(LEARNER.build()).graph))
    (batch,) = (value for value in graph.inputs if graph.values[value].name == "input:0")
    cuts = connected(graph, grow(graph, {batch: 0}, range(len(graph.ops))))[0]
    return graph, expand(graph, Region(cuts, 3))


def test_a_region_as_a_reader_sees_it() -> None:
    graph, looped = learner()
    verify(looped)
    check_golden("fission_region.txt", before_and_after(graph, looped))
    check_golden("fission_region.py.txt", generate(looped))


def test_the_golden_graph_generates_the_golden_step() -> None:
    """Whatever torch captures today: the code belongs to the graph beside it."""
    _, _, after = (HERE / "fission_region.txt").read_text(encoding="utf-8").partition("# after\n")
    assert generate(parse(after)) == (HERE / "fission_region.py.txt").read_text(encoding="utf-8")
