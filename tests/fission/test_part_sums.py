"""Sums over the parts of a loop: as near to float64 as eager's own, whatever the number of parts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.capture import OptimizerSpec
from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.cost.signature import signature
from magis.errors import VerifyError
from magis.fission.candidates import regions_around
from magis.fission.expand import expand
from magis.fission.loss_suffix import pieces
from magis.fission.part_sums import ROUND, with_direct_sums, with_sums_apart
from magis.fission.proof import verify_fission
from magis.fission.region import Region, most_parts
from magis.fission.wide_calls import makes_sums
from magis.graph import Const, Graph, Op, Ref, Value, every_op, verify
from magis.graph.loop_rules import ADDMM, ADDSUM, MERGES, REDUCE, summed
from magis.ops.splits import Split, splits
from magis.planner.plan_proof import prove
from magis.rewrite.functionalize import functionalize, untangle
from magis.search.fission_pareto import levels_at, work_of
from magis.simulate.simulator import replay
from tests.nets import Block, Built, Net
from tests.oracles import captured, graph_step, history, observed, workspaces

WORDS, LENGTH, WIDTH = 96, 128, 16
COSTS = RooflineCosts(find_device("cpu", ""), None, {})
PARTS = (2, 4, 5, 16, 64)
MOST = 1.05
"""Largest error of a gradient, against float64, as a multiple of eager's."""


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 32), nn.SiLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))


def regression() -> nn.Module:
    """Its last gradients are nothing but a sum over rows: only there eager's own error is the rounding of the sum."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def next_words(net: Block, ids: Tensor, labels: Tensor) -> Tensor:
    x = net.embed(ids)
    x = x + net.down(F.silu(net.up(net.norm(x))))
    scores = F.linear(x, net.embed.weight).float()
    return F.cross_entropy(scores.view(-1, WORDS), labels.view(-1))


def decoder() -> nn.Module:
    made = functools.partial(nn.Linear, bias=False)
    return Block(
        next_words, embed=nn.Embedding(WORDS, WIDTH), norm=nn.LayerNorm(WIDTH), up=made(WIDTH, 4 * WIDTH),
        down=made(4 * WIDTH, WIDTH),
    )  # fmt: skip


def first_in_float32(net: Block, images: Tensor, labels: Tensor) -> Tensor:
    """Conversions of the step's own are no part of a sum's."""
    wide = F.conv2d(images.float(), net.first.weight.float(), net.first.bias.float(), padding=1)
    return F.cross_entropy(net.last(net.second(wide.to(images.dtype).relu()).mean((2, 3))), labels)


def mixed() -> nn.Module:
    made = functools.partial(nn.Conv2d, kernel_size=3, padding=1)
    return Block(first_in_float32, first=made(3, 8), second=made(8, 8), last=nn.Linear(8, 5))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))


class Headed(nn.Module):
    """A head whose input dies in its loop, where the loop's own result overwrites it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(32, 32), nn.Linear(32, 500)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        out: Tensor = self.head(torch.tanh(y @ y.new_ones(32, 32) * 0.1) + y)
        return out


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]]
NETWORKS = {
    "perceptron": (perceptron, lambda: (torch.randn(512, 24),), lambda: (torch.randint(5, (512,)),)),
    "regression": (regression, lambda: (torch.randn(4096, 64),), lambda: (torch.randn(4096, 64),)),
    "pictures": (pictures, lambda: (torch.randn(64, 3, 8, 8),), lambda: (torch.randint(5, (64,)),)),
    "mixed": (mixed, lambda: (torch.randn(64, 3, 8, 8), torch.randint(5, (64,))), tuple),
    "decoder": (decoder, lambda: (torch.randint(WORDS, (1, LENGTH)), torch.randint(WORDS, (1, LENGTH))), tuple),
    "headed": (Headed, lambda: (torch.randn(1024, 32),), lambda: (torch.randint(500, (1024,)),)),
    "normed": (normed, lambda: (torch.randn(512, 24),), lambda: (torch.randint(5, (512,)),)),
}


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 8, 3, padding=1), (64, 4, 16), (64, 8, 16)),
    "strided": (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1), (64, 4, 8, 8), (64, 8, 4, 4)),
    "grouped": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=4), (64, 8, 8, 8), (64, 8, 8, 8)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (64, 8, 8, 8), (64, 8, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 4, 2, stride=2), (64, 8, 4, 4), (64, 4, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(4, 8, 3, padding=1), (64, 4, 4, 4, 4), (64, 8, 4, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(4, 16), (64, 16, 4, 4), (64, 16, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(16), (64, 16), (64, 16)),
    "frozen batch norm": (lambda: nn.BatchNorm2d(16).eval(), (64, 16, 4, 4), (64, 16, 4, 4)),
}
"""Layers by themselves, whose gradients are nothing but sums over the batch, with sizes of batch and targets."""
for name, (layer, *sizes) in LAYERS.items():
    batch, like = (functools.partial(lambda shape: (torch.randn(shape),), each) for each in sizes)
    NETWORKS[name] = layer, batch, like


def cast(made: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in made)


@functools.cache
def built(name: str, dtype: torch.dtype, exact: torch.dtype) -> tuple[Built, Graph]:
    """A step that keeps its gradients; parameters and batch are those of ``dtype``, in the dtype ``exact``."""
    module, inputs, targets = NETWORKS[name]
    loss = {"decoder": None, "mixed": None, **dict.fromkeys(("regression", *LAYERS), F.mse_loss)}.get(
        name, F.cross_entropy
    )
    net = Net(
        lambda: module().to(dtype).to(exact), lambda: cast(cast(inputs(), dtype), exact),
        lambda: cast(cast(targets(), dtype), exact), loss, OptimizerSpec("gradients"),
    ).build()  # fmt: skip
    return net, untangle(functionalize(captured(net).graph))


def gradients(net: Built, graph: Graph) -> list[Tensor]:
    step = graph_step(graph, net)
    history(step, 1)
    return [each.detach().double() for each in step.results()[1:]]


def loops(graph: Graph) -> Iterator[tuple[int, Graph]]:
    """The region that sums most gradients, in 2 to 64 parts; of 5 parts, the last one is smaller."""
    products = [at for at, op in enumerate(graph.ops) if op.target == "aten.mm.default" or makes_sums(op)]
    around = (cuts for at in products[-3:] for cuts in regions_around(graph, at, most=8))
    cuts = max([*(piece.cuts for piece in pieces(graph)), *around], key=sums)
    assert sums(cuts) >= 2
    for parts in PARTS:
        uneven = most_parts(cuts) % parts != 0
        if not uneven or all(graph.ops[at].target != "aten.mean.default" for at in cuts):  # a mean has equal parts
            yield parts, expand(graph, Region(cuts, parts, uneven=uneven), in_place=True)


def sums(cuts: Mapping[int, Split]) -> int:
    return sum(split.outputs.count("sum") for split in cuts.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_in_half_precision_are_as_exact_as_eagers(name: str, dtype: torch.dtype) -> None:
    net, graph = built(name, dtype, dtype)
    exact, eager = gradients(*built(name, dtype, torch.float64)), gradients(net, graph)
    seen = 0
    for parts, looped in loops(graph):
        seen += 1
        verify(looped)
        verify_fission(looped, graph)
        prove(looped, graph)
        for found, own, true in zip(gradients(net, looped), eager, exact, strict=True):
            assert (found - true).norm() <= MOST * (own - true).norm(), (parts, *found.shape)
    assert seen == len(PARTS)


def test_products_add_to_their_whole_wherever_a_join_overwrites_their_input() -> None:
    _, graph = built("headed", torch.bfloat16, torch.bfloat16)
    joined = 0
    for piece in pieces(graph):
        looped = expand(graph, Region(piece.cuts, 4), in_place=True)
        verify_fission(looped, graph)
        ops = [op.target for op, _ in every_op(looped) if op.phase == "backward"]
        assert "magis.reduce" not in ops
        joined += "magis.join" in ops
    assert joined > 1


def calls(graph: Graph) -> Iterator[tuple[Op, Mapping[int, Value]]]:
    return ((op, values) for op, values in every_op(graph) if not op.target.startswith("magis."))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_take_the_bytes_that_are_simulated(name: str, dtype: torch.dtype) -> None:
    net, graph = built(name, dtype, dtype)
    for _, looped in loops(graph):
        known = {signature(op, values): workspaces().of(looped)(op, values) for op, values in calls(looped)}
        _, peak, _ = observed(graph_step(looped, net), looped.persistent_bytes())
        assert peak == replay(looped, workspaces().of(looped)).peak_bytes
        assert peak == replay(looped, replace(COSTS, workspaces=known).workspace).peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_part_of_a_weight_gradient_is_held_or_rounded(name: str, dtype: torch.dtype) -> None:
    """A product adds to its whole; apart again, it is the product and the sum that it was."""
    _, graph = built(name, dtype, dtype)
    for _, looped in loops(graph):
        for body in (op.body.graph for op in looped.ops if op.body is not None):
            merged = {value for op in body.ops if op.target in MERGES for value in op.inputs()[1:]}
            assert not any(op.target == "aten.mm.default" and merged & set(op.made()) for op in body.ops)
            assert name in ("pictures", "mixed", *LAYERS) or any(op.target == ADDMM for op in body.ops)
            pairs = (op.inputs() for op in body.ops if op.target == REDUCE and op.phase == "backward")
            assert all(body.values[whole].dtype == body.values[part].dtype for whole, part in pairs)
            apart = with_sums_apart(body)
            assert not any(op.target in (ADDMM, ADDSUM) for op in apart.ops)
            assert len(with_direct_sums(apart).ops) == len(body.ops)
            assert dump_targets(with_direct_sums(apart)) == dump_targets(body)


def dump_targets(body: Graph) -> list[tuple[str, int]]:
    return [(op.target, len(op.inputs())) for op in body.ops]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loops_in_loops_add_to_one_sum(dtype: torch.dtype) -> None:
    """A gradient that both loops sum is one tensor, rounded once."""
    net, graph = built("decoder", dtype, dtype)
    exact, eager = gradients(*built("decoder", dtype, torch.float64)), gradients(net, graph)
    work = work_of(graph, COSTS, reuse=True)
    nested = 0
    for number in range(len(work.places)):
        for cut, level in levels_at(work, number):
            if cut.inner > 1:
                looped = level.compiled.graph
                verify(looped)
                verify_fission(looped, graph)
                inner = [op for outer in looped.ops if outer.body for op in outer.body.graph.ops if op.body]
                nested += sum(bool(summed(op)) for op in inner)
                for found, own, true in zip(gradients(net, looped), eager, exact, strict=True):
                    if found.dim() > 1:  # in vectors of 16, single roundings decide
                        assert (found - true).norm() <= MOST * (own - true).norm() + 1e-6 * true.norm()
    assert nested


@pytest.mark.parametrize("name", ["pictures", *LAYERS])
def test_calls_in_inner_loops_round_no_part(name: str) -> None:
    net, graph = built(name, torch.bfloat16, torch.bfloat16)
    exact, eager = gradients(*built(name, torch.bfloat16, torch.float64)), gradients(net, graph)
    _, looped = next(loops(graph))
    (body,) = (op.body for op in looped.ops if op.body is not None)
    apart = with_sums_apart(body.graph)
    for place in (place for place, op in enumerate(apart.ops) if makes_sums(op)):
        (split,) = (each for each in splits(apart.ops[place], apart.values) if each.inputs[0] == 0)
        inner = replace(body, graph=expand(apart, Region({place: split}, 4)))
        nested = replace(looped, ops=tuple(replace(op, body=inner) if op.body else op for op in looped.ops))
        verify(nested)
        prove(nested, graph)
        for found, own, true in zip(gradients(net, nested), eager, exact, strict=True):
            assert (found - true).norm() <= MOST * (own - true).norm()
        _, peak, _ = observed(graph_step(nested, net), nested.persistent_bytes())
        assert peak == replay(nested, workspaces().of(nested)).peak_bytes


# --- what is wrong with a sum -----------------------------------------------------------------------------------------


@functools.cache
def two_parts() -> tuple[Graph, Graph]:
    """A step in half precision, and the same with its gradients summed over two parts."""
    _, graph = built("perceptron", torch.bfloat16, torch.bfloat16)
    return graph, next(looped for _, looped in loops(graph))


def change_merge(target: str, change: Callable[[Op], Op]) -> Graph:
    """The loop with its first operator of a kind changed."""
    _, looped = two_parts()
    (at,) = (at for at, op in enumerate(looped.ops) if op.body is not None)
    loop = looped.ops[at].body
    assert loop is not None
    (first, *_) = (op for op in loop.graph.ops if op.target == target)
    ops = tuple(change(op) if op is first else op for op in loop.graph.ops)
    body = replace(loop, graph=replace(loop.graph, ops=ops))
    return replace(looped, ops=tuple(replace(op, body=body) if op.body is loop else op for op in looped.ops))


SHAPES: dict[str, tuple[str, Callable[[Op], Op], str]] = {
    "factors in the other order": (ADDMM, lambda op: replace(op, args=(op.args[0], op.args[2], op.args[1])), "adds "),
    "one factor": (ADDMM, lambda op: replace(op, args=op.args[:2]), "needs the whole, and two matrices"),
    "a number": (ADDMM, lambda op: replace(op, args=(*op.args, 2)), "needs the whole, and two matrices"),
    "a keyword": (ADDMM, lambda op: replace(op, kwargs=(("beta", 2),)), "writes the tensor that it merges into"),
    "no write": (ADDMM, lambda op: replace(op, writes=()), "writes the tensor that it merges into"),
    "the whole as a factor": (ADDMM, lambda op: replace(op, args=(op.args[0], op.args[0], op.args[2])), "adds "),
    "other dimensions": (ADDSUM, lambda op: replace(op, args=(*op.args[:2], (1,), True)), "adds "),
    "no dimensions": (ADDSUM, lambda op: replace(op, args=(*op.args[:2], (), True)), "adds "),
    "dimensions dropped": (ADDSUM, lambda op: replace(op, args=op.args[:3]), "adds "),
    "a sum of sums": (ADDSUM, lambda op: replace(op, target=REDUCE, args=(*op.args[:2], "sum")), "merges "),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_sum_of_other_sizes_is_no_graph(name: str) -> None:
    target, change, message = SHAPES[name]
    with pytest.raises(VerifyError, match=re.escape(message)):
        verify(change_merge(target, change))


def change_rounding(change: Callable[[Op], Op]) -> Graph:
    _, looped = two_parts()
    (first, *_) = (op for op in looped.ops if op.target == ROUND and op.phase == "backward")
    return replace(looped, ops=tuple(change(op) if op is first else op for op in looped.ops))


WRONG: dict[str, Callable[[], Graph]] = {
    "another type": lambda: change_rounding(lambda op: replace(op, kwargs=(("dtype", Const("dtype", "float16")),))),
    "another operator": lambda: change_rounding(lambda op: replace(op, target="aten.neg.default", kwargs=())),
    "not rounded": lambda: change_rounding(lambda op: replace(op, target="aten.alias.default", kwargs=())),
    "the other factor twice": lambda: change_merge(
        ADDMM, lambda op: replace(op, target=ADDMM, args=(op.args[0], op.args[1], Ref(twin(op))))
    ),
}


def twin(op: Op) -> int:
    """Another matrix of the body with the layout of the product's second factor."""
    _, looped = two_parts()
    (body,) = (each.body.graph for each in looped.ops if each.body is not None)
    taken = body.values[op.inputs()[2]]
    return next(
        value.id for value in body.values.values()
        if value.id != taken.id and (value.shape, value.stride, value.dtype) == (taken.shape, taken.stride, taken.dtype)
    )  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_another_sum_is_no_plan_of_the_step(name: str) -> None:
    graph, looped = two_parts()
    prove(looped, graph)
    for check in (lambda: verify_fission(WRONG[name](), graph), lambda: prove(WRONG[name](), graph)):
        with pytest.raises(VerifyError):
            check()
