"""Generated code: readable, complete, and forgetful."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from magis.graph import Arg, Graph, Op, Ref, Scalar, Storage, Value, dump, parse
from magis.ops.optimizers import scalars
from magis.runtime.codegen import compile_step, generate
from tests.golden.golden import HERE, check_golden
from tests.nets import ADAMW, NETS, Net, rows
from tests.oracles import captured

MLP = Net(
    lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)), rows(3, 4), rows(3, 2),
    rule=ADAMW,
)  # fmt: skip


def test_a_training_step_as_a_reader_sees_it() -> None:
    graph = captured(MLP.build()).graph
    check_golden("mlp_graph.txt", dump(graph))
    check_golden("mlp_step.py.txt", generate(graph))


def test_the_golden_graph_generates_the_golden_step() -> None:
    """Whatever torch captures today: the code belongs to the graph beside it."""
    graph = parse((HERE / "mlp_graph.txt").read_text(encoding="utf-8"))
    assert generate(graph) == (HERE / "mlp_step.py.txt").read_text(encoding="utf-8")


def assigned(line: ast.stmt) -> list[str]:
    return [
        node.id
        for target in (line.targets if isinstance(line, ast.Assign) else [])
        for node in ast.walk(target)
        if isinstance(node, ast.Name)
    ]


@pytest.mark.parametrize("name", ["attention", "batch-norm", "views", "constants", "encoder-layer", "returns-dict"])
def test_every_tensor_is_forgotten_right_after_its_last_use(name: str) -> None:
    graph = captured(NETS[name].build()).graph
    (function,) = ast.parse(generate(graph)).body
    assert isinstance(function, ast.FunctionDef)
    kept = {f"v{value}" for value in (*graph.inputs, *graph.outputs)}
    alive: set[str] = set()
    last_read: dict[str, int] = {}
    deleted: dict[str, int] = {}
    for at, line in enumerate(function.body):
        if isinstance(line, ast.Delete):
            for target in line.targets:
                assert isinstance(target, ast.Name)
                deleted[target.id] = at
                alive.remove(target.id)
            continue
        reads = {node.id for node in ast.walk(line) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        assert {n for n in reads if n.startswith("v") and n[1:].isdigit()} <= alive
        made = assigned(line)
        alive.update(made)
        last_read.update({n: at for n in (*reads, *made) if n.startswith("v") or n == "none"})
    assert alive - {f"s{number}" for number in range(len(scalars(ADAMW, 1)))} == kept
    for value, at in deleted.items():
        assert at == last_read[value] + 1


def one(args: tuple[Arg, ...], target: str = "aten.add.Tensor", **more: object) -> Graph:
    """A step of one operator on one input."""
    storages = {n: Storage(n, 16, "batch" if n == 1 else "temporary") for n in (1, 2, 3)}
    values = {n: Value(n, (4,), (1,), "float32", n) for n in (1, 2, 3)}
    values[1] = replace(values[1], name="input:0")
    op = Op(0, target, args, (), (2,), reads=((1, 0),))
    return Graph(storages, values, (replace(op, **more),), (1,), (2,))  # type: ignore[arg-type]


def line(args: tuple[Arg, ...], **more: object) -> str:
    return generate(one(args, **more)).splitlines()[3].strip()  # type: ignore[arg-type]


def test_a_module_name_cannot_smuggle_code() -> None:
    """Nor end the source: NUL, halves of characters and marks of direction are written down as numbers."""
    for apart in ("\n", "\r\n", "\u2028", "\x0c", "\0", "\ud800", "\u202e", "\x1a", "\ufeff", "\x85"):
        evil = f"x{apart}raise SystemExit"
        graph = one((Ref(1), 1), module=evil)
        assert len(ast.parse(generate(graph)).body[0].body) == 3  # type: ignore[attr-defined]
        assert compile_step(graph)([torch.zeros(4)], {})[0].tolist() == [1.0] * 4


@pytest.fixture
def operators() -> Iterator[None]:
    """Operators of a user's whose names differ in characters that a plain spelling drops, or are Python's words."""
    with (
        torch.library._scoped_library("qa_codegen", "DEF") as one,
        torch.library._scoped_library("qa", "FRAGMENT") as two,
        torch.library._scoped_library("qa_b", "FRAGMENT") as three,
    ):
        one.define("adds(Tensor x, *, Scalar lambda, Scalar plain) -> Tensor")
        one.impl(
            "adds", lambda x, **numbers: x + numbers["lambda"] + 10 * numbers["plain"], "CompositeExplicitAutograd"
        )
        for library, name, factor in ((two, "b_c", 2.0), (three, "c", 3.0)):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x, factor=factor: x * factor, "CompositeExplicitAutograd")
        yield


@pytest.mark.usefixtures("operators")
def test_names_that_look_alike_stay_apart() -> None:
    graph = one((Ref(1),), "qa.b_c.default")
    other = Op(1, "qa_b.c.default", (Ref(2),), (), (3,), reads=((2, 0),))
    (found,) = compile_step(replace(graph, ops=(*graph.ops, other), outputs=(3,)))([torch.ones(4)], {})
    assert found.tolist() == [6.0] * 4
    keywords = (("lambda", Scalar("a.b")), ("plain", Scalar("a_b")))
    (found,) = compile_step(one((Ref(1),), "qa_codegen.adds.default", kwargs=keywords))(
        [torch.zeros(4)], {"a.b": 1.0, "a_b": 2.0}
    )
    assert found.tolist() == [21.0] * 4
