"""Where a rule must not apply although its operators are there; and patterns that are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magis.errors import MagisError
from magis.extensions.paper.interim_rules import RULES, counted, rule
from magis.fission.candidates import connected
from magis.fission.expand import expand
from magis.fission.loss_suffix import axes, suffix
from magis.fission.loss_suffix import places as places_of
from magis.fission.region import Region
from magis.graph import Graph, Op, Ref, Storage, verify
from magis.rewrite.functionalize import functionalize, untangle
from magis.rewrite.rules.language import parse_pattern
from magis.rewrite.rules.matching import Index
from magis.rewrite.rules.rule_table import aggregated, apply, matches
from tests.nets import ADAMW, FORWARD, Block, Net, rows
from tests.oracles import captured
from tests.rewrite.patterns import graph_of, own, program


def graph(run: Callable[..., object], *shapes: tuple[int, ...], functional: bool = True, **parts: Any) -> Graph:
    def batch() -> tuple[Tensor, ...]:
        return tuple(torch.rand(*shape) for shape in shapes)

    net = Net(lambda: Block(run, **parts), batch, rule=FORWARD, loss_fn=None)
    found = captured(net.build()).graph
    return functionalize(found) if functional else found


def places(name: str, where: Graph) -> int:
    return sum(1 for _ in matches(rule(name), where))


def two_products(use: Callable[[Tensor, Tensor], object]) -> Callable[..., object]:
    return lambda _, x, a, b: use(torch.mm(x, a), torch.mm(x, b))


SHAPES = (3, 4), (4, 2), (4, 2)


def test_two_products_are_merged() -> None:
    assert places("merge-mm", graph(two_products(lambda left, right: own(left) + own(right)), *SHAPES)) == 1


def test_not_what_the_caller_gets() -> None:
    assert places("merge-mm", graph(two_products(lambda left, right: (left, right)), *SHAPES)) == 0


@pytest.mark.parametrize("name", ["merge-mm", "merge-mm-rows"])
def test_not_what_is_addressed_by_places_in_memory(name: str) -> None:
    def strided(_: object, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        left, right = (torch.mm(x, a), torch.mm(x, b)) if name == "merge-mm" else (torch.mm(a, x), torch.mm(b, x))
        return own(left.as_strided((2, 2), (4, 1), 1)) + own(right.as_strided((2, 2), (4, 1), 1))

    shapes = ((3, 4), (4, 4), (4, 4)) if name == "merge-mm" else ((4, 4), (3, 4), (3, 4))
    where = graph(strided, *shapes)
    assert any("as_strided" in op.target for op in where.ops)
    assert places(name, where) == 0


def test_calls_that_differ_in_the_sign_of_zero_are_no_twins() -> None:
    where = graph(lambda _, x: own(torch.mul(x, 0.0).reciprocal()) + own(torch.mul(x, -0.0).reciprocal()), (3, 4))
    assert places("derematerialize", where) == 0


def test_not_what_is_written_later() -> None:
    written = graph(two_products(lambda left, right: own(left.add_(1.0)) + own(right)), *SHAPES, functional=False)
    assert any(op.writes for op in written.ops)
    assert places("merge-mm", written) == 0


def test_not_what_needs_its_own_result() -> None:
    def run(_: Block, x: Tensor, a: Tensor) -> Tensor:
        first = torch.mm(x, a)
        return own(torch.mm(x, torch.relu(first)))

    where = graph(run, (3, 3), (3, 3))
    assert [*rule("merge-mm").occurrences(Index(where))]
    assert places("merge-mm", where) == 0


def test_not_random_numbers() -> None:
    """Two draws from one tensor are two draws."""

    def run(_: Block, x: Tensor) -> Tensor:
        return torch.bernoulli(x) + torch.bernoulli(x)

    assert places("derematerialize", graph(run, (3, 3))) == 0


def test_not_contents_that_changed_in_between() -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        first = torch.relu(block.state)
        block.state.add_(x)
        return first + torch.relu(block.state)

    assert places("derematerialize", graph(run, (3, 3), state=torch.rand(3, 3))) == 0


def test_weights_are_never_copied_along_with_other_tensors() -> None:
    def run(block: Any, x: Tensor, a: Tensor) -> Tensor:
        return own(torch.mm(x, block.layer.weight.t())) + own(torch.mm(x, torch.relu(a)))

    where = graph(run, (3, 4), (4, 2), layer=nn.Linear(4, 2, bias=False))
    assert places("merge-mm", where) == 0


def test_weights_side_by_side_in_one_order_only() -> None:
    """Once query lies before key, a sum that needs key before query is not merged by copying."""

    def run(block: Any, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        both = own(block.query(x)), own(block.key(x))
        return (*both, own(torch.mm(y, block.key.weight) + torch.mm(z, block.query.weight)))

    layers = {name: nn.Linear(4, 3, bias=False) for name in ("query", "key")}
    where = graph(run, (2, 4), (2, 3), (2, 3), **layers)
    assert places("merge-sum", where) == places("merge-sum-back", where) == 1
    merged = apply(where, next(matches(rule("merge-mm"), where)))
    assert (places("merge-sum", merged), places("merge-sum-back", merged)) == (0, 1)


def test_not_what_leaves_the_device() -> None:
    """Swapping frees a storage whole: a window on a larger one would take the others with it."""
    where = graph(two_products(lambda left, right: own(left) + own(right)), *SHAPES)
    product = next(op for op in where.ops if op.target == "aten.mm.default").made()[0]
    looks = where.values[product]
    kept = replace(looks, id=max(where.values) + 1, storage=max(where.storages) + 1)
    host = Storage(kept.storage, looks.nbytes, "host")
    store = Op(99, "magis.store", (Ref(product),), (), (kept.id,), reads=((looks.storage, 0),))
    wait = Op(100, "magis.wait", (Ref(product), Ref(kept.id)), (), ())
    storages, values = {**where.storages, host.id: host}, {**where.values, kept.id: kept}
    swapped = replace(where, storages=storages, values=values, ops=(*where.ops, store, wait))
    verify(swapped)
    assert (places("merge-mm", where), places("merge-mm", swapped)) == (1, 0)


def test_a_match_is_good_for_its_graph_alone() -> None:
    where = graph_of(program(rule("merge-mm"), 0))
    match = next(matches(rule("merge-mm"), where))
    with pytest.raises(LookupError, match="merge-mm does not apply"):
        apply(apply(where, match), match)


def test_matching_changes_nothing() -> None:
    where = graph_of(program(rule("merge-sum"), 0))
    before = Graph(dict(where.storages), dict(where.values), where.ops, where.inputs, where.outputs, {})
    assert counted(where)["merge-sum"] == 1
    assert where == before


@pytest.mark.parametrize("each", RULES, ids=lambda each: each.name)
def test_aggregation_ends(each: Any) -> None:
    """Whatever it starts from, and where it ends no aggregation applies."""
    after, _ = aggregated(graph_of(program(each, 0)))
    assert +aggregated(after)[1] == {}


@pytest.mark.parametrize("text", ["", "a + b", "mm(a, 2)", "mm(a, dims=-1)", "cat(a, dim=0)", "(", "**a", "*(*a)"])
def test_no_pattern(text: str) -> None:
    with pytest.raises(MagisError, match="not a pattern"):
        parse_pattern(text)


class TwiceThrough(nn.Module):
    """Three layers with one input, used twice: in a loop and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def once(self, x: Tensor) -> Tensor:
        return torch.tanh(self.q(x)) * torch.sigmoid(self.k(x)) + self.v(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.once(torch.tanh(self.once(x)))


def test_whatever_a_rule_does_beside_a_loop_is_sound() -> None:
    net = Net(TwiceThrough, rows(16, 8), rows(16, 8), rule=ADAMW, loss_fn=lambda made, wanted: (made - wanted).sum())
    step = untangle(functionalize(captured(net.build()).graph))
    looped = tried = 0
    for axis in axes(step):
        for at in places_of(step, axis, 8):
            cuts = suffix(step, axis, at)
            if not cuts:
                continue
            with_loop = expand(step, Region(connected(step, cuts)[0], 2), in_place=True)
            verify(with_loop)
            looped += 1
            for each in RULES:
                for match in matches(each, with_loop):
                    verify(apply(with_loop, match))
                    tried += 1
    assert looped > 3
    assert tried > 20
