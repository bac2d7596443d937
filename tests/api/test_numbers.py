"""Numbers of a step with loops: close enough, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from magis.capture.workload import Workload
from magis.cases.comparison import compare_rounding
from magis.fission.candidates import connected, follow
from magis.fission.expand import expand
from magis.fission.loss_suffix import batch_inputs
from magis.fission.region import Region
from magis.graph import Graph, Op
from magis.graph.loop_rules import LOOP
from magis.ops.optimizers import OptimizerSpec
from magis.planner.subject import Subject
from magis.planner.workload_source import Source


def network(seed: int) -> Workload:
    """A perceptron with a norm whose running statistics are buffers, on a batch of eight."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    rule = OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1)
    return Workload("net", body, (torch.randn(8, 6),), (torch.randint(3, (8,)),), F.cross_entropy, rule)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(Source("net", network, "float32", "cpu", 0))


@pytest.fixture(scope="module")
def looped(subject: Subject) -> Graph:
    """The step with everything behind the norm in four parts."""
    graph = subject.untangled
    (hidden,) = (v for op in graph.ops if "native_batch_norm.default" in op.target for v in op.made()[:1])
    axis = follow(graph, {**batch_inputs(graph), hidden: 0})
    found = expand(graph, Region(connected(graph, axis.cuts)[0], 4))
    assert [op.body.parts for op in found.ops if op.body is not None] == [4]
    return found


def changed(graph: Graph, found: Callable[[Op], bool], change: Callable[[Op], Op]) -> Graph:
    """With the first such operator changed, wherever it stands."""
    for position, op in enumerate(graph.ops):
        new: Op | None = change(op) if found(op) else None
        if op.body is not None and any(found(each) for each in op.body.graph.ops):
            new = replace(op, body=replace(op.body, graph=changed(op.body.graph, found, change)))
        if new is not None:
            return replace(graph, ops=(*graph.ops[:position], new, *graph.ops[position + 1 :]))
    raise AssertionError("no such operator")


def calls(name: str, phase: str) -> Callable[[Op], bool]:
    return lambda op: op.target.split(".")[1] == name and op.phase == phase


def with_argument(position: int, value: object) -> Callable[[Op], Op]:
    def change(op: Op) -> Op:
        return replace(op, args=(*op.args[:position], value, *op.args[position + 1 :]))  # type: ignore[arg-type]

    return change


def test_a_step_in_parts_is_within_tolerance(subject: Subject, looped: Graph) -> None:
    assert any(op.target == LOOP for op in looped.ops)
    assert compare_rounding(subject, looped, 0) == "within tolerance"
    assert compare_rounding(subject, looped, 3) == "within tolerance"


def test_a_step_without_loops_is_too(subject: Subject) -> None:
    assert compare_rounding(subject, subject.normal, 0) == "within tolerance"


def test_a_wrong_gradient_is_named(subject: Subject, looped: Graph) -> None:
    """GELU's backward of the other formula: off in the fourth digit."""
    wrong = changed(
        looped, calls("gelu_backward", "backward"), lambda op: replace(op, kwargs=(("approximate", "tanh"),))
    )
    found = compare_rounding(subject, wrong, 0)
    assert found.startswith("differs: gradient of ")
    assert found.endswith(" times as far off as rounding allows")


def test_a_sum_that_misses_a_part_is_a_wrong_gradient(subject: Subject, looped: Graph) -> None:
    """What parts add up to, taken for a mean."""
    wrong = changed(looped, lambda op: op.target == "magis.reduce" and op.args[-1] == "sum", with_argument(2, "mean"))
    assert compare_rounding(subject, wrong, 0).startswith("differs: ")


def test_a_wrong_loss_is_named(subject: Subject, looped: Graph) -> None:
    wrong = changed(looped, calls("gelu", "forward"), lambda op: replace(op, kwargs=(("approximate", "tanh"),)))
    assert compare_rounding(subject, wrong, 0).startswith("differs: loss is ")


def test_a_wrong_update_is_named(subject: Subject, looped: Graph) -> None:
    """The last operator of one weight's update left out."""
    at = next(at for at, op in enumerate(looped.ops) if calls("addcdiv_", "update")(op))
    wrong = replace(looped, ops=(*looped.ops[:at], *looped.ops[at + 1 :]))
    found = compare_rounding(subject, wrong, 0)
    assert found.startswith("differs: ")
    assert " after the step, by the same gradient" in found
    assert "gradient of" not in found


def test_a_wrong_optimizer_state_is_named(subject: Subject, looped: Graph) -> None:
    """The second moment of one weight is halved behind its last use."""
    at = max(at for at, op in enumerate(looped.ops) if calls("addcdiv_", "update")(op))
    state = next(v for v in looped.inputs if looped.values[v].name.startswith("state:exp_avg_sq"))
    name = looped.values[state].name.removeprefix("state:")
    like = next(op for op in looped.ops if calls("mul_", "update")(op))
    halved = replace(like, args=(replace_ref(like, state), 0.5), outputs=(None,))
    wrong = replace(looped, ops=(*looped.ops[: at + 1], halved, *looped.ops[at + 1 :]))
    assert (
        compare_rounding(subject, wrong, 0) == f"differs: optimizer state {name} after the step, by the same gradients"
    )


def cornered(seed: int) -> Workload:
    """A perceptron whose rectifier has an input of exactly zero once: the last bit of a weight decides on its side."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Threshold(0.0, 0.0), nn.Linear(16, 3))
    inputs = torch.randn(8, 6)
    with torch.no_grad():
        body[0].weight[0, :2] = torch.tensor([0.3, -0.3])
        inputs[0] = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    return Workload("net", body, (inputs,), (torch.randint(3, (8,)),), F.cross_entropy, OptimizerSpec("sgd", lr=1e-2))


def test_the_other_side_of_a_corner_is_within_tolerance_and_any_other_gradient_is_not() -> None:
    subject = Subject(Source("net", cornered, "float32", "cpu", 0))
    graph, mask = subject.normal, calls("threshold_backward", "backward")
    assert compare_rounding(subject, graph, 0) == "within tolerance"
    assert compare_rounding(subject, changed(graph, mask, with_argument(2, -1e-9)), 0) == "within tolerance"
    assert compare_rounding(subject, changed(graph, mask, with_argument(2, -0.05)), 0).startswith("differs: gradient ")
    assert compare_rounding(subject, changed(graph, mask, with_argument(2, 0.05)), 0).startswith("differs: gradient ")


class Clamped(nn.Module):
    """Two layers; the forward changes the weights of one of them, and of one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.used.weight.clamp_(-0.2, 0.2)
            self.unused.weight.clamp_(-0.2, 0.2)
        return self.used(x)  # type: ignore[no-any-return]


def test_weights_that_the_forward_changes_are_compared() -> None:
    def make(seed: int) -> Workload:
        torch.manual_seed(seed)
        rule = OptimizerSpec("adamw", lr=1e-2)
        return Workload("net", Clamped(), (torch.randn(8, 6),), (torch.randint(3, (8,)),), F.cross_entropy, rule)

    subject = Subject(Source("net", make, "float32", "cpu", 0))
    assert compare_rounding(subject, subject.normal, 0) == "within tolerance"
    unused = next(v for v in subject.normal.inputs if subject.normal.values[v].name == "parameter:unused.weight")
    wrong = changed(subject.normal, lambda op: "clamp" in op.target and unused in op.inputs(), with_argument(1, -0.1))
    assert compare_rounding(subject, wrong, 0) == "differs: unused.weight after the step, by the same gradient"


def replace_ref(op: Op, value: int) -> object:
    return replace(op.args[0], value=value)  # type: ignore[type-var]


def test_a_wrong_buffer_is_named(subject: Subject, looped: Graph) -> None:
    """Statistics that run at half the pace."""
    wrong = changed(looped, calls("native_batch_norm", "forward"), with_argument(6, 0.05))
    found = compare_rounding(subject, wrong, 0)
    assert found.startswith("differs: buffer 0.running_mean, by up to ")


def test_a_buffer_may_differ_by_rounding_alone(subject: Subject, looped: Graph) -> None:
    wrong = changed(looped, calls("native_batch_norm", "forward"), with_argument(6, 0.1 * (1 + 1e-6)))
    assert compare_rounding(subject, wrong, 0) == "within tolerance"


# --- the optimizer's part of a step -----------------------------------------------------------------------------------


def test_an_update_alone_is_the_rest_of_the_step(subject: Subject) -> None:
    whole, twin = subject.eager(), subject.eager()
    whole.prepare()
    whole.run()
    twin.update(dict(whole.gradients()))
    for name, parameter in whole.module.named_parameters():
        assert torch.equal(parameter, dict(twin.module.named_parameters())[name])
    assert {name: tensor.tolist() for name, tensor in whole.state().items()} == {
        name: tensor.tolist() for name, tensor in twin.state().items()
    }
    assert twin.gradients() == {}


def test_an_update_leaves_alone_what_has_no_gradient(subject: Subject) -> None:
    twin, before = subject.eager(), subject.fresh().module
    twin.update({"1.weight": torch.ones(16, 6)})
    moved = [
        name for name, parameter in before.named_parameters()
        if not torch.equal(parameter, dict(twin.module.named_parameters())[name])
    ]  # fmt: skip
    assert moved == ["1.weight"]
