"""Peaks of compiled steps, predicted without inductor's kernels, are those that the CPU's allocator counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import magis
from magis.errors import CaptureError, UsageError
from magis.extensions.compile.compiled_window import compiled_window
from magis.models.custom import as_workload
from magis.results import Case
from magis.runtime.measure import collector_spared, window_peak
from tests.compile.nets import fresh_dynamo

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
ROWS, WIDTH = 2048, 64
LARGE = 4 * ROWS * WIDTH
"""Bytes of one activation."""

Parts = tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_dynamo():
        yield


class Chain(nn.Module):
    """Pointwise operators on a large tensor, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x * self.scale).exp() + 1
        out: Tensor = self.last(x)
        return out


class Blocks(nn.Module):
    """Residual blocks, which may be checkpointed, or broken by print."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = self._added(first, x)
        if self.kind == "broken":
            print(end="")  # noqa: T201 (breaks a graph)
        for block in (second,):
            if self.kind == "skipped":  # dynamo leaves a function to eager mode that breaks in a loop
                print(end="")  # noqa: T201 (breaks a graph)
            x = self._added(block, x)
        return x

    def _added(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = x + (checkpoint(block, x, use_reentrant=False) if self.kind == "checkpointed" else block(x))
        return out


class Attended(nn.Module):
    """Attention within a checkpoint, which draws its kernel's seed again when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + checkpoint(self._mixed, x, use_reentrant=False)
        return out

    def _mixed(self, x: Tensor) -> Tensor:
        parts = self.parts(x).view(ROWS // 64, 64, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0))
        out: Tensor = self.last(mixed.transpose(1, 2).reshape(x.shape))
        return out


def made(kind: str) -> Parts:
    """A step by name."""
    torch.manual_seed(0)
    module = {"chain": Chain, "attended": Attended}[kind]() if kind in ("chain", "attended") else Blocks(kind)
    return module, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)), F.mse_loss


def measured(kind: str, what: str) -> int:
    """Bytes above what stays of one forward, loss and backward, of inductor's own code."""
    module, (inputs, targets), loss = made(kind)
    call = torch.compile(module) if what == "model" else module

    def whole() -> Tensor:
        return loss(call(inputs), targets)

    run = torch.compile(whole) if what == "loss" else whole
    for _ in range(2):
        run().backward()
        module.zero_grad()
    with collector_spared():
        return window_peak(lambda: run().backward()).peak_bytes


def predicted(kind: str, what: str) -> Any:
    return compiled_window(as_workload(kind, made(kind), "sgd", who=kind), what, None, 1)


@compiler
@pytest.mark.parametrize("what", ["model", "loss"])
@pytest.mark.parametrize("kind", ["chain", "checkpointed", "attended", "broken", "skipped"])
def test_peaks_are_those_of_the_code_that_inductor_runs(kind: str, what: str) -> None:
    found = predicted(kind, what)
    assert found.tensor_bytes == pytest.approx(measured(kind, what), rel=0.01)


def test_on_a_gpu_checkpointed_attention_is_the_gpus() -> None:
    work = as_workload("attended", made("attended"), "sgd", who="the test").to("bfloat16")
    found = compiled_window(work, "model", None, 512, "cuda")
    called = [each.op.target for each in found.calls if "attention" in each.op.target]
    assert len(called) == 3  # forward, forward again, backward
    assert not any("for_cpu" in target for target in called)


class Odd(nn.Module):
    """Rows whose length is no multiple of what a GPU reads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 1037), nn.Linear(1037, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.sin(self.up(x)))
        return out


def test_on_a_gpu_rows_are_padded() -> None:
    _, batch, loss = made("plain")
    work = as_workload("odd", (Odd(), batch, loss), "sgd", who="the test")
    sizes = {
        kind: {nbytes for _, nbytes in compiled_window(work, "model", None, 1, kind).events} for kind in ("cpu", "cuda")
    }
    assert 4 * ROWS * 1037 in sizes["cpu"]
    assert not any(abs(nbytes - 4 * ROWS * 1056) < 4 * 32 for nbytes in sizes["cpu"])
    assert any(abs(nbytes - 4 * ROWS * 1056) < 4 * 32 for nbytes in sizes["cuda"])


def test_fusion_removes_what_eager_keeps() -> None:
    eager = magis.estimate(*made("chain"), "sgd", device="cpu").peak_bytes
    fused = magis.estimate(*made("chain"), "sgd", device="cpu", compiled="loss").peak_bytes
    assert eager - fused > 4 * LARGE


def test_saved_activations_are_the_partitioners() -> None:
    from torch._functorch import config

    usual = predicted("plain", "loss").tensor_bytes
    with config.patch(activation_memory_budget=0.0):
        assert predicted("plain", "loss").tensor_bytes < usual - 2 * LARGE


def test_a_graph_break_is_named_and_counted() -> None:
    found = magis.estimate(*made("broken"), "sgd", device="cpu", compiled=True)
    assert "2 graphs" in found.result.note
    assert "test_compiled_peaks.py:" in found.result.note
    whole = magis.estimate(*made("plain"), "sgd", device="cpu", compiled=True)
    assert "1 graph" in whole.result.note
    assert "break" not in whole.result.note
    skipped = magis.estimate(*made("skipped"), "sgd", device="cpu", compiled=True)
    assert "graph breaks: Failed to trace builtin operator" in skipped.result.note


class Branch(nn.Module):
    """A branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if y.sum() > 0 else y


def test_a_branch_on_data_is_refused_in_one_line() -> None:
    _, batch, loss = made("plain")
    with pytest.raises(
        CaptureError, match=r"between its graphs: .* at test_compiled_peaks.py:\d+; remove the graph break"
    ):
        magis.estimate(Branch(), batch, loss, "sgd", device="cpu", compiled=True)


def test_the_estimate_adds_what_stays_and_the_update() -> None:
    module, batch, loss = made("plain")
    found = magis.estimate(module, batch, loss, "adamw", device="cpu", compiled=True)
    weights = sum(each.nbytes for each in module.parameters())
    window = predicted("plain", "model")
    assert found.peak_bytes == 3 * weights + sum(each.nbytes for each in batch) + window.tensor_bytes
    assert found.by_kind["parameter"] == weights
    assert found.by_kind["state"] == 2 * weights
    assert sum(found.by_kind.values()) == found.result.memory.tensor_bytes
    assert found.remedies == ()
    assert "compiled" in str(found)


def test_where_the_update_is_the_peak_it_is_eagers() -> None:
    module = nn.Linear(1024, 1024)
    batch = torch.randn(2, 1024), torch.randn(2, 1024)
    compiled = magis.estimate(module, batch, F.mse_loss, "adamw", device="sim:h100", compiled=True)
    eager = magis.estimate(module, batch, F.mse_loss, "adamw", device="sim:h100")
    assert compiled.at_peak.phase == eager.at_peak.phase == "update"
    assert compiled.peak_bytes == pytest.approx(eager.peak_bytes, rel=0.01)
    assert compiled.reserved_bytes == pytest.approx(eager.reserved_bytes, rel=0.1)


@compiler
@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_a_compiled_update_needs_no_more_than_the_gradients(kind: str) -> None:
    module, (inputs, targets) = nn.Linear(256, 256), (torch.randn(2, 256), torch.randn(2, 256))
    eager, compiled = (
        magis.estimate(module, (inputs, targets), F.mse_loss, kind, device="cpu", compiled=what)
        for what in ("loss", "step")
    )
    assert compiled.peak_bytes < eager.peak_bytes or kind == "momentum"  # which takes nothing in eager mode
    known = {"adamw": torch.optim.AdamW, "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    optimizer = known[kind](module.parameters())
    run, update = torch.compile(lambda: F.mse_loss(module(inputs), targets)), torch.compile(optimizer.step)

    def step() -> None:
        run().backward()
        update()
        module.zero_grad()

    for _ in range(2):
        step()
    states = 2 if kind == "adamw" else 1
    stays = (1 + states) * sum(each.nbytes for each in module.parameters()) + inputs.nbytes + targets.nbytes
    with collector_spared():
        assert compiled.peak_bytes == pytest.approx(stays + window_peak(step).peak_bytes, rel=0.01)


@compiler
def test_nothing_of_a_prediction_is_left() -> None:
    module, (inputs, targets), loss = made("plain")
    before = {name: each.clone() for name, each in module.state_dict().items()}
    drawn = torch.get_rng_state()
    magis.estimate(module, (inputs, targets), loss, "sgd", device="cpu", compiled=True)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    assert all(each.grad is None for each in module.parameters())
    torch.testing.assert_close(torch.compile(module)(inputs), module(inputs))  # kernels that compute


def test_the_largest_batch_of_a_compiled_step() -> None:
    limit = magis.estimate(*made("chain"), "sgd", device="cpu", compiled=True).peak_bytes
    found = magis.fit(*made("chain"), "sgd", memory_limit=limit, device="cpu", compiled=True, most=ROWS + 64)
    assert found.magis is None
    assert found.eager is not None
    assert found.eager.size == ROWS
    assert found.eager.peak_bytes == limit


def test_reserved_bytes_are_those_of_the_settings() -> None:
    rows = 8 * ROWS + 1
    step = Blocks("plain"), (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)), F.mse_loss, "sgd"
    predict = partial(magis.estimate, *step, device="sim:h100", compiled=True)
    plain, growing = (predict(allocator=text) for text in ("", "expandable_segments:True"))
    assert plain.peak_bytes == growing.peak_bytes <= growing.needed_bytes < plain.needed_bytes
    assert plain.remedies == ()
    for limited in (growing, plain):
        limit, settings = limited.needed_bytes, limited.allocator
        found = magis.fit(*step, memory_limit=limit, device="sim:h100", allocator=settings, compiled=True, most=rows)
        assert found.eager is not None
        assert (found.eager.size, found.eager.reserved_bytes) == (rows, limit)


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"compiled='whole'; use 'model' or 'loss' or 'step'"):
        magis.estimate(*made("chain"), "sgd", device="cpu", compiled="whole")


def test_the_page_is_true(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = (repository / "docs" / "estimate.md").read_text(encoding="utf-8").partition("## Compiled steps")[2]
    block = section.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": __name__}  # dynamo imports the module of a class
    exec(compile(block, "docs/estimate.md", "exec"), names)
    assert names["compiled"].against(names["eager"])["activation"] < 0
    assert "network compiled, in 1 graph" in capsys.readouterr().out


def test_the_gate_predicts_the_strategy_compile() -> None:
    case = Case("mlp", "compile", "sim:h100", "small")
    found = magis.run_case(case)
    alone = magis.estimate("mlp", device="sim:h100", preset="small", compiled="loss")
    assert found.optimized.simulated.peak_bytes == alone.peak_bytes
    assert found.optimized.reserved_bytes == alone.reserved_bytes
    assert "network and loss compiled, in 1 graph" in found.note
