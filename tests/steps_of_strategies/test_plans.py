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
from magis.cases.kept_results import KeptResults
from magis.errors import UsageError
from magis.extensions.ranks import RankJob, RankPool, mean_losses
from magis.extensions.ranks.strategies.model_plans import plan_of, written_in_stages
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.predict import fake_world, predict_rank
from magis.report.text_store import Kept
from magis.results import Case
from magis.strategies import World, distributed_strategy
from tests.steps_of_strategies import plan_nets

HERE = "tests.steps_of_strategies.plan_nets"


def check(nets: list[str], strategies: tuple[str, ...]) -> None:
    with RankPool(2, "cpu") as pool:
        for net in nets:
            make = getattr(plan_nets, net)
            alone = plan_nets.losses_alone(make())
            for name in strategies:
                reports = pool.run(RankJob(f"{HERE}:{net}", name, rounds=1))
                memory = [predict_rank(distributed_strategy(name), make, 2, rank).predicted for rank in range(2)]
                expected = [each.tensor_bytes for each in memory if each]
                assert [each.memory.tensor_bytes for each in reports] == expected, (net, name)
                assert mean_losses(reports) == pytest.approx(alone, rel=1e-6), (net, name)


def test_a_stranger_is_cut_by_its_plan() -> None:
    check(["plain", "tied", "feed"], ("tp", "pp"))


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
        ("tp", {"tp_plan": {"up": "colwise", "dwon": "rowwise"}}, "names 'dwon', which it does not have"),
        ("tp", {"tp_plan": {0: "colwise"}}, "has the key 0"),
        ("pp", {"pp_plan": {"up": None}}, "the pp_plan of Pair says None of 'up'"),
        ("pp", {"pp_plan": {"up": "h"}}, "says 'h' of 'up'"),
        ("pp", {"pp_plan": {"up": (["h"],)}}, "of 'up'"),
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


FEED_PLAN = plan_nets.Feed.pp_plan
ALL_X = {name: (["x"], ["x"]) for name in FEED_PLAN}


class Again(plan_nets.Feed):
    """Reads behind the blocks what it made in front of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.enter(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.leave(x + first)
        return out


class Scaled(plan_nets.Feed):
    """Computes between its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x) * 2
        out: torch.Tensor = self.leave(x)
        return out


class Wrapped(plan_nets.Feed):
    """Its blocks return tuples."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            vars(block)["forward"] = lambda x, own=block: (type(own).forward(own, x),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)[0]
        out: torch.Tensor = self.leave(x)
        return out


class Placed(plan_nets.Feed):
    """Adds a parameter in front of the blocks."""

    pp_plan = FEED_PLAN | {"place": (["tokens"], ["h"])}

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.place)


class Entering(plan_nets.Feed):
    """All parts take and give a tensor of one name."""

    pp_plan = ALL_X


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Again, "reads what comes from enter behind blocks.3"),
        (Scaled, "computes with the hidden state between blocks.0 and the next block"),
        (Wrapped, "has blocks.0 return a tuple"),
        (Placed, "has the parameter place in front of its blocks"),
        (Entering, "uses enter.weight in front of blocks.3, and the plan has it behind"),
    ],
)
def test_a_forward_that_stages_would_change_is_refused(kind: type[plan_nets.Feed], line: str) -> None:
    with pytest.raises(UsageError, match=line) as caught:
        prepared(plan_nets.feed(kind), "pp")
    assert "\n" not in str(caught.value)


def test_a_network_is_written_in_stages_if_its_methods_take_what_stages_give() -> None:
    class Timer(plan_nets.Feed):
        def start(self) -> None: ...
        def block(self) -> None: ...
        def finish(self) -> None: ...

    class Staged(plan_nets.Feed):
        def start(self, x: Any) -> Any: ...
        def block(self, index: int, x: Any) -> Any: ...
        def finish(self, x: Any) -> Any: ...

    assert [written_in_stages(kind(), 1) for kind in (Timer, Staged)] == [False, True]


def test_another_plan_is_another_result(tmp_path: Path) -> None:
    subject = Subject(Source("feed", lambda _seed: plan_nets.feed(), "float32", "cpu", 0))
    kept = KeptResults(Kept(tmp_path), subject, Case("feed", "tp", "cpu", "small", ranks=2))
    before = kept.key()
    vars(subject.traced.module)["tp_plan"] = {"blocks.0.up": "colwise", "blocks.0.down": "rowwise"}
    assert kept.key() != before
    del vars(subject.traced.module)["tp_plan"]
    assert kept.key() == before


def test_heads_of_keys_that_ranks_do_not_divide_are_refused() -> None:
    with fake_world(4, 0), pytest.raises(UsageError, match="2 heads are too few for 4 ranks"):
        distributed_strategy("tp4").prepare(plan_nets.plain(), World(4, 0, fake=True))
