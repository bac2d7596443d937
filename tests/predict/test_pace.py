"""Predicted times of a rank: operators as the cost model prices them, messages by their bytes and their group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from magis.capture.captured import capture
from magis.capture.workload import Workload, fake_tensors
from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.cost.links import links_of
from magis.cost.operator_latency import Prices
from magis.errors import UsageError
from magis.extensions.ranks.prediction.step_time import Links, StepTime, predict_step
from magis.extensions.ranks.strategies.schedules import Waiting
from magis.ops.optimizers import OptimizerSpec
from magis.predict import fake_world
from magis.strategies.distributed_names import distributed_strategy

V100 = find_device("sim:v100")
LINKS = Links(1e9, message_ns=100, hidden=0.5)


def net() -> Workload:
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return Workload(
        "net", module, (torch.randn(32, 64),), (torch.randn(32, 8),), nn.functional.mse_loss, OptimizerSpec("adamw")
    )


def test_operators_cost_what_a_captured_graph_says() -> None:
    with fake_tensors():
        work = net()
        pace = StepTime(V100, LINKS)
        step = capture(work.module, work.inputs, work.targets, work.loss_fn, OptimizerSpec("sgd"), device="cpu")
        costs = RooflineCosts(V100, None, {}, Prices(V100))
        expected = {
            target: sum(costs.nanoseconds(op, step.graph.values) for op in step.graph.ops if op.target == target)
            for target in ("aten.addmm.default", "aten.relu.default")
        }
        with pace:
            work.module(*work.inputs)
    assert expected["aten.addmm.default"] > 0
    views = pace.compute_ns - sum(expected.values())
    assert 0 <= views <= 8 * V100.view_ns


@pytest.mark.parametrize(
    ("call", "factor", "hidden"),
    [
        (lambda x, y: dist.all_reduce(x), 1.5, False),  # 2 * 3/4
        (lambda x, y: dist.all_reduce(x, async_op=True), 1.5, True),
        (lambda x, y: dist.broadcast(x, 0), 1.0, False),
        (lambda x, y: dist.all_gather_single(y, x), 4 * 0.75, False),
        (lambda x, y: dist.reduce_scatter_single(x, y, async_op=True), 4 * 0.75, True),
        (lambda x, y: dist.barrier(), 0.0, False),
    ],
)
def test_a_message_takes_its_share_of_the_bytes_over_the_link(call, factor: float, *, hidden: bool) -> None:
    pace = StepTime(V100, LINKS)
    with fake_world(4, 0), fake_tensors():
        x, y = torch.zeros(1000), torch.zeros(4000)
        with pace:
            call(x, y)
    expected = factor * 4000 / 1e9 * 1e9 + 100 if factor else 0.0
    assert (pace.exposed_ns, pace.hidden_ns) == pytest.approx((0.0, expected) if hidden else (expected, 0.0))


def test_messages_hide_behind_half_of_the_work_and_a_pipeline_stands_idle() -> None:
    pace = StepTime(V100, LINKS)
    pace.compute_ns, pace.exposed_ns, pace.hidden_ns = 1_000_000, 50_000.0, 400_000.0
    assert pace.ms() == pytest.approx(1.05)
    pace.hidden_ns = 700_000.0
    assert pace.ms() == pytest.approx(1.25)
    assert pace.ms(passes=4) == pytest.approx(1.625)
    assert StepTime(V100, LINKS).ms() == 0.0
    idle = StepTime(V100, LINKS)
    idle.compute_ns = 1_000_000
    assert idle.ms(Waiting("", ranks=3, rank=0, count=4)) == pytest.approx(1.5)
    idle.add_hidden(1_000_000, 4)
    assert idle.hidden_ns == pytest.approx(1.5e6)


def test_more_ranks_have_less_to_compute_and_slower_links_cost_time() -> None:
    def ms(name: str, ranks: int, device: str) -> float:
        return predict_step(distributed_strategy(name), net, ranks, 0, find_device(device))[1]

    assert ms("zero2", 4, "sim:v100") > ms("ddp", 4, "sim:v100") > 0
    assert ms("zero2", 4, "cpu") > ms("zero2", 1, "cpu"), "a net this small has more to send than to compute"
    with pytest.raises(UsageError, match="needs a multiple of 2 ranks, there are 3"):
        ms("tp", 3, "cpu")


def wide(batch: int) -> Workload:
    """A layer whose gradient takes longer to send than an eighth of the step, and less than half of it."""
    module, rule = nn.Linear(2048, 2048, bias=False), OptimizerSpec("sgd")
    given = (torch.randn(batch, 2048),), (torch.randn(batch, 2048),)
    return Workload("wide", module, *given, nn.functional.mse_loss, rule)


@pytest.mark.parametrize(("name", "shown"), [("ddp", False), ("accumulate4+ddp", True)])
def test_gradients_of_micro_batches_hide_behind_the_last_one(name: str, *, shown: bool) -> None:
    alone, two = (
        predict_step(distributed_strategy(name), lambda share=batch: wide(share), ranks, 0, V100)[1]
        for ranks, batch in ((1, 128), (2, 256))
    )
    sent = 2048 * 2048 * 4 / links_of("v100").bytes_per_s * 1e3
    assert alone / 8 < sent < alone / 2
    assert two - alone == pytest.approx(sent - alone / 8 if shown else 0.0, abs=alone / 1000)
