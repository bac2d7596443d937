"""Needless order constraints go, and not a bit of any number changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import rustworkx as rx
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.graph import Graph, verify
from magis.graph.hazards import dependency_graph
from magis.rewrite.functionalize import functionalize, untangle
from tests.golden.golden import before_and_after, check_golden
from tests.nets import ADAMW, NETS, SGD, Block, Built, Net, labels, mlp, rows
from tests.oracles import captured, differences, graph_step, history

POINTWISE = ("_to_copy", "div", "tanh", "mul", "tanh_backward")
NLL = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")


def with_ignored(count: int, classes: int, ignored: int, every: int) -> Callable[[], tuple[Tensor, ...]]:
    """Class numbers, the ignored one at every so many places."""

    def drawn() -> tuple[Tensor, ...]:
        target = torch.randint(classes, (count,))
        target[::every] = ignored
        return (target,)

    return drawn


def classifier(targets: Callable[[], tuple[Tensor, ...]], dtype: torch.dtype = torch.float32, **loss: object) -> Net:
    """Five classes, six rows."""
    return Net(mlp(dtype), rows(6, 12, dtype=dtype), targets, functools.partial(F.cross_entropy, **loss), ADAMW)


def pixels(dtype: torch.dtype = torch.float32, ignored: float = 0.3) -> Net:
    """A class for every pixel, some of them ignored."""

    def drawn() -> tuple[Tensor, ...]:
        target = torch.randint(4, (3, 6, 5))
        return (torch.where(torch.rand(3, 6, 5) < ignored, -100, target),)

    module = functools.partial(nn.Conv2d, 2, 4, 3, padding=1, dtype=dtype)
    return Net(module, rows(3, 2, 6, 5, dtype=dtype), drawn, F.cross_entropy, SGD)


def merged_rows(between: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Net:
    """Two sequences of three tokens, whose scores go through `between` before their rows are merged."""

    def run(self: Block, ids: Tensor) -> Tensor:
        return between(self.head(self.embed(ids))).view(-1, 7)

    def module() -> nn.Module:
        return Block(run, embed=nn.Embedding(7, 4, dtype=dtype), head=nn.Linear(4, 7, bias=False, dtype=dtype))

    return Net(module, lambda: (torch.randint(7, (2, 3)),), with_ignored(6, 7, -100, 4), F.cross_entropy, ADAMW)


def read_twice(scores: Tensor) -> Tensor:
    """Scores that something else than a view reads in their three dimensions."""
    warm = scores.tanh()
    return warm * warm.sum(1, keepdim=True)


MERGED: dict[str, Net] = {
    "rows merged in float32": merged_rows(lambda scores: scores.float(), torch.bfloat16),
    "rows merged behind a chain": merged_rows(lambda scores: (scores / 30).tanh() * 30),
    "rows merged, read twice": merged_rows(read_twice),
}
"""Scores of tokens whose shape changes between a product and its loss."""

LOSSES: dict[str, Net] = {
    "every target counts": classifier(labels(6, 5)),
    "some ignored": classifier(with_ignored(6, 5, -100, 2)),
    "all but one ignored": classifier(lambda: (torch.tensor([-100, -100, 3, -100, -100, -100]),)),
    "all ignored": classifier(with_ignored(6, 5, -100, 1)),
    "a class ignored": classifier(with_ignored(6, 5, 2, 3), ignore_index=2),
    "bfloat16": classifier(labels(6, 5), torch.bfloat16),
    "bfloat16, some ignored": classifier(with_ignored(6, 5, -100, 4), torch.bfloat16),
    "bfloat16, all ignored": classifier(with_ignored(6, 5, -100, 1), torch.bfloat16),
    "float16": classifier(with_ignored(6, 5, -100, 4), torch.float16),
    "float64": classifier(with_ignored(6, 5, -100, 4), torch.float64),
    "smoothed": classifier(with_ignored(6, 5, -100, 4), label_smoothing=0.1),
    "pixels": pixels(),
    "pixels, none ignored": pixels(ignored=0.0),
    "pixels, all ignored": pixels(ignored=2.0),
    "pixels, bfloat16": pixels(torch.bfloat16),
    "one row": Net(lambda: nn.Linear(4, 5), rows(4), lambda: (torch.tensor(3),), F.cross_entropy),
    **MERGED,
    "tokens": replace(NETS["tied"], targets=with_ignored(15, 11, -100, 4)),
}
"""Means of cross-entropies, each with a trait that is easy to get wrong."""

SUMS: dict[str, Net] = {
    "summed": classifier(with_ignored(6, 5, -100, 4), reduction="sum"),
    "summed, class weights": replace(
        classifier(lambda: (*with_ignored(6, 5, -100, 4)(), torch.rand(5))),
        loss_fn=lambda scores, target, weight: F.cross_entropy(scores, target, weight, reduction="sum"),
    ),
    "summed, bfloat16": classifier(with_ignored(6, 5, -100, 4), torch.bfloat16, reduction="sum"),
    "summed pixels": replace(pixels(), loss_fn=functools.partial(F.cross_entropy, reduction="sum")),
}
"""Sums of cross-entropies, whose gradient takes a total weight but does not use it."""


class Reshaped(nn.Module):
    """Element-wise calls between views: of rows, of all elements, and many in a row."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(2, 4, 6)), calls

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.weight).view(-1, 6)
        for _ in range(self.calls):
            x = x * 1.01
        x = x.view(2, 4, 6)
        return (x.view(-1) / 3).view(2, 4, 6)


MEANS: dict[str, Net] = {
    "squares": Net(mlp(), rows(7, 12), rows(7, 5), F.mse_loss, ADAMW),
    "squares in float64": Net(mlp(torch.float64), rows(7, 12, dtype=torch.float64), rows(7, 5, dtype=torch.float64)),
    "squares in bfloat16": Net(
        mlp(torch.bfloat16), rows(7, 12, dtype=torch.bfloat16), rows(7, 5, dtype=torch.bfloat16)
    ),
    "scaled squares": Net(mlp(), rows(7, 12), rows(7, 5), lambda x, t: F.mse_loss(x, t) * 0.3, ADAMW),
    "squares of rows": Net(mlp(), rows(7, 12), rows(7, 5), lambda x, t: F.mse_loss(x.t(), t.t()), ADAMW),
    "squares between two": Net(mlp(), rows(7, 12), tuple, lambda x: F.mse_loss(x, x.tanh()), ADAMW),
}
"""Means of squares."""

VIEWS: dict[str, Net] = {
    "reshaped": Net(Reshaped, rows(2, 4, 6, dtype=torch.float32), rows(2, 4, 6, dtype=torch.float32), F.mse_loss),
    "many calls between views": Net(
        functools.partial(Reshaped, 600),
        rows(2, 4, 6, dtype=torch.float32),
        rows(2, 4, 6, dtype=torch.float32),
        F.mse_loss,
    ),
}


@functools.cache
def case(name: str) -> tuple[Built, Graph, Graph]:
    net = {**NETS, **LOSSES, **SUMS, **MEANS, **VIEWS}[name].build()
    graph = functionalize(captured(net).graph)
    return net, graph, untangle(graph)


@pytest.mark.parametrize("name", [*LOSSES, *SUMS, *MEANS, *VIEWS, *NETS])
def test_not_a_bit_changes(name: str) -> None:
    net, graph, after = case(name)
    verify(after)
    assert (after.inputs, after.outputs, after.constants) == (graph.inputs, graph.outputs, graph.constants)
    assert after.persistent_bytes() == graph.persistent_bytes()
    if after != graph:
        expected, found = (history(graph_step(each, net), 2) for each in (graph, after))
        assert differences(expected, found) == []


@pytest.mark.parametrize("name", MERGED)
def test_rows_stay_merged_from_the_head_to_the_loss_and_back(name: str) -> None:
    """Element-wise calls between two views work on merged rows, unless another call reads the shape in between."""
    _, graph, after = case(name)

    def in_rows(step: Graph) -> list[bool]:
        calls = [op for op in step.ops if op.phase != "update" and op.target.split(".")[1] in POINTWISE]
        looks = [step.values[value].shape for op in calls for value in op.made()]
        return [len(shape) == 2 for shape in looks if shape[-1:] == (7,)]

    assert not any(in_rows(graph))
    assert all(in_rows(after)) == (name != "rows merged, read twice")


# --- what waits for what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_what_counts_depends_on_the_targets_alone(name: str) -> None:
    """The loss's backward formula and the loss itself take the number of targets from operators on the targets."""
    _, graph, after = case(name)
    (target,) = (value for value in graph.inputs if graph.values[value].name == "target:0")
    dag = dependency_graph(after)
    maker = {value: at for at, op in enumerate(after.ops) for value in op.made()}
    for op in after.ops:
        if "nll_loss" in op.target and "backward" in op.target:
            total = maker[op.inputs()[-1]]
            before = {total, *rx.ancestors(dag, total)}
            assert {value for at in before for value in after.ops[at].inputs() if value in after.inputs} == {target}
    assert [op.args[3] for op in after.ops if op.target in NLL] == [2]


@pytest.mark.parametrize("name", MEANS)
def test_the_gradient_of_a_mean_of_squares_counts_no_elements(name: str) -> None:
    """So that a part, which has fewer, computes its rows of the same gradient."""
    _, _, after = case(name)
    assert any("mse_loss_backward" in op.target for op in after.ops) == (
        name in ("squares in bfloat16", "squares of rows")
    )


@pytest.mark.parametrize("name", SUMS)
def test_the_gradient_of_a_sum_waits_for_no_loss(name: str) -> None:
    _, _, after = case(name)
    dag = dependency_graph(after)
    (forward,) = (at for at, op in enumerate(after.ops) if op.target in NLL)
    (backward,) = (at for at, op in enumerate(after.ops) if "nll_loss" in op.target and "backward" in op.target)
    assert forward not in rx.ancestors(dag, backward)


@pytest.mark.parametrize("name", VIEWS)
def test_no_view_stands_between_element_wise_calls(name: str) -> None:
    _, _, after = case(name)
    assert not [op.target for op in after.ops if op.target in ("aten.view.default", "aten._unsafe_view.default")]


def test_a_mean_as_a_reader_sees_it() -> None:
    net = Net(lambda: nn.Linear(4, 3), rows(5, 4), labels(5, 3), F.cross_entropy).build()
    graph = functionalize(captured(net).graph)
    check_golden("fission_untangle.txt", before_and_after(graph, untangle(graph)))


# --- what must stay ---------------------------------------------------------------------------------------------------
