"""Networks of strangers, cut by the plans that they carry: two ranks train as one does, with the bytes predicted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from magis.capture import Workload
from magis.errors import UsageError
from magis.extensions.ranks import RankJob, RankPool, mean_losses
from magis.extensions.ranks.strategies.model_plans import plan_of
from magis.ops.optimizers import torch_optimizer
from magis.predict import fake_world, predict_rank
from magis.strategies import World, distributed_strategy
from tests.steps_of_strategies import plan_nets

HERE = "tests.steps_of_strategies.plan_nets"


def losses_alone(work: Workload) -> list[float]:
    """The losses of three steps in a single process."""
    optimizer = torch_optimizer(work.optimizer, dict(work.module.named_parameters()))
    assert optimizer is not None
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = work.loss_fn(work.module(*work.inputs), *work.targets)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def check(nets: list[str], strategies: tuple[str, ...]) -> None:
    with RankPool(2, "cpu") as pool:
        for net in nets:
            make = getattr(plan_nets, net)
            alone = losses_alone(make())
            for name in strategies:
                reports = pool.run(RankJob(f"{HERE}:{net}", name, rounds=1))
                memory = [predict_rank(distributed_strategy(name), make, 2, rank).predicted for rank in range(2)]
                expected = [each.tensor_bytes for each in memory if each]
                assert [each.memory.tensor_bytes for each in reports] == expected, (net, name)
                assert mean_losses(reports) == pytest.approx(alone, rel=1e-6), (net, name)


def test_a_stranger_is_cut_by_its_plan() -> None:
    check(["plain", "tied"], ("tp", "pp"))


@pytest.mark.soak
@pytest.mark.parametrize("net", ["llama", "qwen", "mistral"])
def test_decoders_of_hugging_face_are_cut_by_their_configurations(net: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf: transformers is not installed")
    check([net], ("tp", "pp"))


def test_a_plan_names_modules_and_parameters_by_pattern() -> None:
    found = plan_of(plan_nets.tied().module, "tp_plan")
    assert found["lm_head"] == "colwise_gather_output"
    assert found["model.layers.2.self_attn.o_proj"] == "rowwise"
    assert sum(style == "packed_colwise" for style in found.values()) == 3


class Pair(nn.Module):
    """Two layers under a plan of torch's own styles."""

    tp_plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 66)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


def prepared(work: Workload, name: str) -> Any:
    with fake_world(2, 0):
        return distributed_strategy(name).prepare(work, World(2, 0, fake=True))


def test_the_documents_network_is_cut_by_its_styles() -> None:
    text = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    space: dict[str, Any] = {}
    exec(code, space)
    x, y = torch.randn(4, 64), torch.randn(4, 64)
    work = Workload("feed", space["FeedForward"](), (x,), (y,), nn.functional.mse_loss, plan_nets.RULE)
    step = prepared(work, "tp")
    assert [tuple(p.to_local().shape) for p in step.module.parameters()] == [(128, 64), (128,), (64, 128), (64,)]


def test_a_plan_of_torch_styles_is_applied() -> None:
    step = prepared(plan_nets.trained("pair", Pair()), "tp")
    assert [tuple(p.to_local().shape) for p in step.module.parameters()] == [(4, 6), (4,), (66, 4), (66,)]


@pytest.mark.parametrize(
    ("name", "plan", "line"),
    [
        ("tp", {"tp_plan": {"up": "by_magic"}}, "cuts up by 'by_magic', which tp does not know"),
        ("tp", {"tp_plan": {}}, "no attention to share in Pair"),
        ("tp+sp", {}, "where the sequence of a Pair is cut"),
        ("pp", {}, "where to cut, and Pair says nothing"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(name: str, plan: dict[str, Any], line: str) -> None:
    pair = Pair()
    vars(pair).update(plan)
    with pytest.raises(UsageError, match=line) as caught:
        prepared(plan_nets.trained("pair", pair), name)
    assert "\n" not in str(caught.value)


def test_parts_that_a_pipelines_plan_leaves_out_are_refused() -> None:
    work = plan_nets.plain()
    vars(work.module)["_pp_plan"] = {}
    with pytest.raises(UsageError, match=r"the pp_plan of Model does not say on which stage lm_head.weight is"):
        prepared(work, "pp")


def test_heads_of_keys_that_ranks_do_not_divide_are_refused() -> None:
    with fake_world(4, 0), pytest.raises(UsageError, match="2 heads are too few for 4 ranks"):
        distributed_strategy("tp4").prepare(plan_nets.plain(), World(4, 0, fake=True))
