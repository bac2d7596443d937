"""`magis.estimate`: the gate's own figures, by kind, with what would make the step fit."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import magis
from magis.cli.main import main
from magis.cost.cards import card_bytes, limit_bytes
from magis.frontends import estimating
from magis.results import Case

DEVICE = "sim:h100"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks(count: int = 4) -> tuple[object, ...]:
    net = nn.Sequential(*(Block() for _ in range(count)))
    return (
        net,
        (torch.randn(256, 16), torch.randn(256, 16)),
        nn.functional.mse_loss,
        torch.optim.AdamW(net.parameters()),
    )


def few_blocks() -> tuple[object, ...]:
    return blocks(2)


def long_blocks() -> tuple[object, ...]:
    net, _, loss, optimizer = blocks()
    return net, (torch.randn(16384, 16), torch.randn(16384, 16)), loss, optimizer


NAME, LONG = f"{__name__}:blocks", f"{__name__}:long_blocks"


@pytest.fixture(scope="module")
def step() -> magis.api.Estimate:
    return magis.estimate(NAME, device=DEVICE, memory_limit=2 * 1024 * 1024)


def test_it_is_the_eager_case_of_the_gate(step: magis.api.Estimate) -> None:
    case = magis.run_case(Case(NAME, "eager", DEVICE, "paper"))
    assert (step.peak_bytes, step.reserved_bytes) == (case.memory.peak_bytes, case.original.reserved_bytes)
    assert step.needed_bytes == step.reserved_bytes > step.peak_bytes
    assert sum(step.by_kind.values()) == step.peak_bytes == step.at_peak.tensor_bytes
    assert step.latency_ms == case.original.simulated_ms > 0


def test_a_module_and_a_function_are_estimated_alike(step: magis.api.Estimate) -> None:
    net, batch, loss, optimizer = blocks()
    assert isinstance(net, nn.Module)
    assert callable(loss)
    as_module = magis.estimate(net, batch, loss, optimizer, device=DEVICE)
    as_function = magis.estimate(blocks, device=DEVICE)
    by_word = magis.estimate(net, batch, loss, "adamw", device=DEVICE)
    assert {each.peak_bytes for each in (as_module, as_function, by_word, step)} == {step.peak_bytes}
    assert as_function.limit_bytes == limit_bytes("h100") < 79 * 2**30
    assert as_function.fits()
    assert not as_function.fits("1 MiB")
    assert as_function.missing_bytes(as_function.needed_bytes - 1) == 1


def test_remedies_are_cases_of_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "QUICK", 100)
    step = magis.estimate(LONG, device=DEVICE, memory_limit=2 * 1024 * 1024)
    found = {remedy.name: remedy for remedy in step.remedies}
    assert {"checkpoint", "magis"} <= set(found)
    checkpointed = magis.run_case(Case(LONG, "checkpoint", DEVICE, "paper"))
    assert found["checkpoint"].needed_bytes == checkpointed.optimized.reserved_bytes
    ratio = float(found["magis"].how.rpartition("=")[2])
    asked = Case(LONG, "magis", DEVICE, "paper", memory_ratio=ratio, memory_limit_of="reserved", budget=100)
    planned = magis.run_case(asked)
    assert found["magis"].needed_bytes == planned.optimized.reserved_bytes
    for remedy in found.values():
        assert remedy.fits == (remedy.needed_bytes <= step.limit_bytes)
        assert remedy.latency_ratio > 0


GROWING = "expandable_segments:True"


def test_settings_of_the_allocator(step: magis.api.Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = magis.estimate(NAME, device=DEVICE, memory_limit=2 * 1024 * 1024, allocator=GROWING)
    assert (grown.peak_bytes, grown.allocator, step.allocator) == (step.peak_bytes, GROWING, "")
    case = magis.run_case(Case(NAME, "eager", DEVICE, "paper", allocator=GROWING))
    assert grown.reserved_bytes == case.original.reserved_bytes == case.optimized.reserved_bytes
    assert str(grown).splitlines()[1].endswith(f"for 2.00 MiB, with {GROWING}")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", GROWING)
    assert magis.estimate(NAME, device=DEVICE).allocator == GROWING
    assert magis.estimate(NAME, device=DEVICE, allocator="").reserved_bytes == step.reserved_bytes
    assert magis.estimate(NAME, device="cpu").allocator == ""
    unchanged = magis.run_case(Case(NAME, "eager", DEVICE, "paper"))
    assert unchanged.original.reserved_bytes == step.reserved_bytes
    half = magis.estimate(NAME, device=DEVICE, allocator="per_process_memory_fraction:0.5")
    assert half.limit_bytes == card_bytes("h100") // 2


def test_segments_that_grow_are_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    step = magis.estimate(gaps, device=DEVICE)
    grown = step._subject.reserved_bytes(step._subject.captured.original, GROWING) or 0
    assert step.peak_bytes < grown < step.needed_bytes

    def within(limit: int) -> magis.api.Estimate:
        return magis.api.Estimate(step.result, step._bench, step._make, limit)

    monkeypatch.setattr(magis.api.Estimate, "_tried", lambda *_, **__: None)  # no searches for the other remedies
    (remedy,) = within(grown).remedies
    assert (remedy.name, remedy.needed_bytes, remedy.latency_ratio, remedy.fits) == ("expandable", grown, 1.0, True)
    assert remedy.how.endswith(f"PYTORCH_ALLOC_CONF={GROWING}")
    assert not within(grown - 1).remedies[0].fits
    assert step.releases == within(step.needed_bytes).releases == 0
    tight = within(step.needed_bytes - 2**21)
    assert not tight.fits()
    assert tight.releases
    assert f"releases what is cached ({tight.releases} in two steps)" in str(tight)
    assert within(step.peak_bytes - 1).releases is None


def gaps() -> tuple[object, ...]:
    """Layers of different widths, whose tensors do not fill the segments of those before."""
    widths = (1000, 3000, 1400, 2600, 1800, 2200, 1000)
    net = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
    batch = torch.randn(3000, 1000), torch.randn(3000, 1000)
    return net, batch, nn.functional.mse_loss, torch.optim.AdamW(net.parameters())


def test_why_one_step_needs_more_than_another(step: magis.api.Estimate) -> None:
    lean = magis.estimate(blocks, device=DEVICE)
    frozen, batch, loss, _ = blocks()
    assert isinstance(frozen, nn.Sequential)
    assert callable(loss)
    for block in frozen[:-1]:
        block.requires_grad_(requires_grad=False)
    partly = magis.estimate(frozen, batch, loss, "adamw", device=DEVICE)
    assert step.against(lean) == {}
    why = step.against(partly)
    assert why["state"] > 0
    assert sum(why.values()) == step.peak_bytes - partly.peak_bytes


def test_the_largest_batch_is_the_last_that_fits() -> None:
    found = magis.estimate(blocks, device="cpu", memory_limit="1 MiB")
    size = found.largest_batch()
    assert size is not None

    def peak(rows: int) -> int:
        def make() -> tuple[object, ...]:
            net, _, loss, optimizer = blocks()
            return net, (torch.randn(rows, 16), torch.randn(rows, 16)), loss, optimizer

        return magis.estimate(make, device="cpu").needed_bytes

    assert peak(size) <= 2**20 < peak(size + 1)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "QUICK", 100)
    assert main(["estimate", NAME, "--device", DEVICE]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{NAME} on {DEVICE}, float32: peak ")
    assert out[1] == "fits for 78.52 GiB, what CUDA leaves of 79.11 GiB, with the default allocator"
    assert (
        main(["estimate", f"{__name__}:few_blocks", "--device", "cpu", "--memory-limit", "16 KiB", "--largest-batch"])
        == 1
    )
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("does not fit: ")
    assert any(
        re.fullmatch(r"checkpoint: .*does not fit, \d\.\d\d times the time \(checkpoint each.*", line) for line in out
    )
    assert out[-1] == "largest batch that fits: none"


def test_the_example_of_the_page_runs(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (repository / "docs" / "estimate.md").read_text(encoding="utf-8")
    block, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)  # another: tests/compile
    block = block.replace("range(8)", "range(2)").replace("256 MiB", "64 MiB")  # as it is, it takes half a minute
    exec(compile(block, "docs/estimate.md", "exec"), {"__name__": "page"})
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "rows would fit" in out


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_other_examples_of_the_page_run(repository: Path, capsys: pytest.CaptureFixture[str], number: int) -> None:
    page = (repository / "docs" / "estimate.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[number]
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(block, "docs/estimate.md", "exec"), names)
    said = {1: "gradient", 2: "step on cpu, float32: peak", 3: "MiB with the worst batch first"}
    assert said[number] in capsys.readouterr().out


def test_every_option_is_in_the_page(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = (repository / "docs" / "estimate.md").read_text(encoding="utf-8")
    rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
    assert {each for each in options if not each.startswith("--magis-")} <= set(re.findall(r"--[a-z-]+", rows))


@torch.library.custom_op("magis_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    """An operator that takes eight times its result inside."""
    return (x.repeat(8, 1) * 2)[: x.shape[0]].clone()


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda _, grad: grad * 2)
