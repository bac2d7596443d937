"""`torch.compile(backend="magis")`: eager's numbers, the planned bytes, and what happens where nothing is planned."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from magis.extensions.compile.dynamo_backend import magis
from magis.runtime.measure import window_peak
from tests.compile.nets import Twins, chain, fresh_dynamo, targets_of

# torch's own, of dynamo on arguments that are no leaves
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_dynamo():
        yield


def rows(count: int = 256, width: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_the_planned_bytes_are_the_measured_ones() -> None:
    twins = Twins(chain(), F.mse_loss, memory_ratio=0.7)
    batch = rows(seed=1), rows(seed=2)
    for seed in range(3):
        twins.step(seed, *batch)
    (report,) = twins.reports
    assert report.feasible
    assert report.recomputed
    assert report.planned_bytes <= 0.7 * report.original_bytes
    assert twins.peak(*batch) == report.planned_bytes
    assert "recomputed" in str(report)


@pytest.mark.filterwarnings("ignore:magis. no plan found")
def test_gradients_of_batch_norms_lie_like_their_inputs() -> None:
    """Torch's function for fake tensors lays them out like the gradient that it takes, here a transposed one: then the
    norm before seems to need less scratch."""

    class Pixels(nn.Module):  # a picture's, one a row
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 12, 3, padding=1), nn.Linear(12, 5)
            self.norms = nn.Sequential(nn.BatchNorm2d(12), nn.BatchNorm2d(12))
            self.conv.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norms(self.conv(x)).flatten(2).transpose(1, 2))

    torch.manual_seed(0)
    batch = torch.randn(4, 3, 8, 8), torch.randn(4, 64, 5)
    twins = Twins(Pixels(), F.mse_loss, memory_ratio=0.7)
    twins.step(0, *batch)
    twins.step(1, *batch)
    (report,) = twins.reports
    assert report.fallback == ""
    assert twins.peak(*batch) == report.planned_bytes


def test_batch_norms_and_dropouts_are_recomputed_with_their_first_numbers() -> None:
    module = chain(32, 3, lambda: nn.Dropout(0.3), lambda: nn.BatchNorm1d(32))
    twins = Twins(module, F.mse_loss, memory_ratio=0.3)
    with pytest.warns(UserWarning, match="no plan found"):
        twins.step(0, rows(1024, seed=1), rows(1024, seed=2))
    twins.step(1, rows(1024, seed=3), rows(1024, seed=4))
    again = targets_of(twins.reports[0].recomputed)
    assert {"native_dropout", "native_batch_norm"} <= again
    assert not twins.reports[0].feasible


def test_train_and_eval_are_planned_apart_and_inference_is_not() -> None:
    twins = Twins(chain(32, 2, lambda: nn.Dropout(0.3)), F.mse_loss, memory_ratio=0.9)
    batch = rows(seed=1), rows(seed=2)
    twins.step(0, *batch)
    for module in twins.modules:
        module.eval()
    twins.step(1, *batch)
    assert len(twins.reports) == 2
    with torch.no_grad():
        assert torch.equal(*(forward(*batch) for forward in twins.forwards))
    assert len(twins.reports) == 2


def test_the_loss_may_be_outside_and_gradients_may_go_on() -> None:
    module = chain(32, 3)
    reports: list[Any] = []
    compiled = torch.compile(module, backend=magis, options={"memory_ratio": 0.8, "report": reports.append})
    inputs = rows().requires_grad_()
    compiled(inputs * 2).square().mean().backward()
    ours = [inputs.grad, *(p.grad for p in module.parameters())]
    inputs.grad = None
    module.zero_grad(set_to_none=True)
    module(inputs * 2).square().mean().backward()
    theirs = [inputs.grad, *(p.grad for p in module.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None)
    assert reports[0].memory_ratio <= 0.8


class Feed(nn.Module):
    """A feed-forward layer, to be checkpointed."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(32, 128), nn.Dropout(dropout), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Checkpointed(nn.Module):
    """Layers whose user recomputes them, but for what his policy saves."""

    def __init__(self, dropout: float, saves: bool, checkpoints: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Feed(dropout) for _ in range(4))
        products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        self.further = {"context_fn": products} if saves else {}
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **self.further) if self.checkpoints else layer(x)
        return x


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.filterwarnings("ignore:magis. no plan found")  # a search this short finds none: what is written then runs
def test_the_users_own_checkpointing_is_the_step_that_a_limit_is_of(dropout: float, saves: bool) -> None:
    batch = rows(1024, seed=1), rows(1024, seed=2)

    def peak(net: nn.Module, backend: Any) -> int:
        called = torch.compile(lambda x, y: F.mse_loss(net(x), y), backend=backend)
        called(*batch).backward()
        net.zero_grad(set_to_none=True)
        held = sum(each.nbytes for each in (*net.parameters(), *batch))
        return held + window_peak(lambda: called(*batch).backward()).peak_bytes

    plain = peak(Checkpointed(dropout, saves, checkpoints=False), "aot_eager")
    written = peak(Checkpointed(dropout, saves), "aot_eager")
    twins = Twins(Checkpointed(dropout, saves), F.mse_loss, memory_ratio=0.8)
    twins.step(0, *batch)
    report = twins.reports[0]
    assert report.original_bytes <= written + 4 * 5056 < plain
    assert twins.peak(*batch) == report.planned_bytes <= report.original_bytes
    assert report.limit_bytes == pytest.approx(0.8 * report.original_bytes, abs=1)


@pytest.mark.filterwarnings("ignore:magis. a graph ends")
@pytest.mark.filterwarnings("ignore:magis. no plan found")  # the second has little to spare
def test_graphs_between_breaks_are_planned_each() -> None:
    class Broken(nn.Module):  # two halves, and the loss behind them
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = chain(32, 2), chain(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    twins = Twins(Broken(), F.mse_loss, memory_ratio=0.95)
    twins.step(0, rows(seed=1), rows(seed=2))
    assert [report.fallback for report in twins.reports] == [""] * 3


def test_inputs_and_buffers_that_change_are_those_of_eager() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = chain(32, 3)
            self.register_buffer("mean", torch.zeros(32))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(x.mean(0))
            x = x.clone()
            x[:, 0] = 0  # a constant of the graph
            return self.body(x) + self.mean

    twins = Twins(Remembering(), F.mse_loss, memory_ratio=0.9)
    for seed in range(2):
        twins.step(seed, rows(seed=1), rows(seed=2))
    assert not twins.reports[0].fallback


def test_the_entry_point_names_the_backend(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (entry,) = project["entry-points"]["torch_dynamo_backends"].items()
    module, _, name = entry[1].partition(":")
    assert entry[0] == "magis"
    assert getattr(import_module(module), name) is magis
