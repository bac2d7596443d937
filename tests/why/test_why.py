"""`magis.why`: each remedy is the changed step, and the order is what the page says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magis
from magis.api import Bench
from magis.cli.main import main
from magis.errors import UsageError
from magis.extensions.why.diagnosis import Diagnosis, order
from magis.extensions.why.eight_bit_adam import BLOCK, EightBitAdam
from magis.frontends.estimating import Remedy
from magis.models.model_specs import from_function
from magis.results import Case
from tests.steps_of_strategies.test_by_hand import OwnLoss

WORDS, WIDTH, LENGTH, ROWS = 2048, 64, 32, 8
GPU = "sim:h100"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def token_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.view(-1, WORDS), tokens.view(-1))


def decoder() -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor], torch.optim.Optimizer]:
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH))
    net = Decoder()
    return net, (tokens, tokens), token_loss, torch.optim.AdamW(net.parameters())


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    names = ["checkpoint", "chunked-loss", "accumulate2", "accumulate4", "early-update", "loop-update", "host-state"]
    return magis.why(decoder, device=GPU, remedies=[*names, "8-bit-state", "bfloat16", "lora", "expandable"])


@pytest.mark.parametrize("name", ["checkpoint", "chunked-loss", "accumulate2", "early-update", "bfloat16"])
def test_a_remedy_has_the_figures_of_the_gates_case(found: Diagnosis, name: str) -> None:
    changes: dict[str, Any] = {"dtype": "bfloat16", "strategy": "eager"} if name == "bfloat16" else {"strategy": name}
    case = Case("decoder", device=GPU, preset="paper", **changes)
    result = magis.run_case(case, cache=Bench(), make=from_function("decoder", decoder))
    remedy = found.remedy(name)
    assert (remedy.needed_bytes, remedy.peak_bytes) == (result.optimized.reserved_bytes, result.memory.peak_bytes)
    assert remedy.latency_ratio * found.estimate.latency_ms == pytest.approx(result.optimized.simulated_ms)


def test_remedies_take_away_what_they_are_for(found: Diagnosis) -> None:
    kinds, peak = found.estimate.by_kind, found.estimate.peak_bytes
    scores = ROWS * LENGTH * WORDS * 4
    assert peak - found.remedy("chunked-loss").peak_bytes > scores
    assert peak - found.remedy("host-state").peak_bytes > 0.8 * kinds["state"]
    assert found.remedy("host-state").latency_ratio > 1
    assert peak - found.remedy("8-bit-state").peak_bytes > 0.7 * kinds["state"]
    assert found.remedy("lora").peak_bytes < peak - 0.8 * kinds["state"]
    assert found.remedy("accumulate2").latency_ratio > 1


def test_remedies_are_in_the_order_that_the_page_tells(found: Diagnosis) -> None:
    assert found.refused == ()
    names = [each.name for each in found.remedies]
    assert any(" + " in name for name in names)
    assert len({name for name in names if name.startswith("accumulate") and " + " not in name}) == 1
    needed, others = found.estimate.needed_bytes, frozenset({"bfloat16", "lora"})
    keys = [order(each, needed, others) for each in found.remedies]
    assert keys == sorted(keys)
    assert all(each.needed_bytes < 0.99 * needed for each in found.remedies)
    assert f"{found.remedies[0].how}\n" in str(found)
    assert "at the peak: " in str(found)


def test_what_fits_comes_first_then_what_trains_the_same_then_single_ones() -> None:
    def remedy(name: str, share: int, ratio: float = 1.0, *, fits: bool = True) -> Remedy:
        return Remedy(name, share, ratio, fits, "", share)

    ordered = [
        remedy("amp", 80, 0.5), remedy("checkpoint", 40, 1.2), remedy("offload", 30, 3.0),
        remedy("amp + checkpoint", 20), remedy("lora", 10), remedy("expandable", 5, fits=False),
    ]  # fmt: skip
    mixed = [ordered[at] for at in (4, 1, 5, 0, 3, 2)]
    assert sorted(mixed, key=lambda each: order(each, 100, frozenset({"lora"}))) == ordered


def test_a_pair_is_both_changes_of_one_step(found: Diagnosis) -> None:
    pair = next(each for each in found.tried if set(each.name.split(" + ")) == {"chunked-loss", "8-bit-state"})
    assert pair.peak_bytes < min(found.remedy(name).peak_bytes for name in ("chunked-loss", "8-bit-state"))


def test_moved_state_is_on_the_device_for_one_weight_at_a_time() -> None:
    def wide() -> tuple[object, ...]:
        net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        batch = torch.randn(4, 256), torch.randn(4, 256)
        return net, batch, nn.functional.mse_loss, torch.optim.AdamW(net.parameters())

    one = 256 * 256 * 4
    made = magis.why(wide, device=GPU, remedies=["host-state", "loop-update"], pairs=False)
    looped, moved = made.remedy("loop-update").peak_bytes, made.remedy("host-state").peak_bytes
    assert moved - made.estimate.by_kind["batch"] < 20.5 * one  # 8 weights, 8 gradients, a state of 2, temporaries
    assert looped - moved >= (2 * 8 - 2) * one


def test_a_users_module_stays_as_it_is() -> None:
    net, batch, loss, optimizer = decoder()
    before = {name: (id(each), each.requires_grad) for name, each in net.named_parameters()}
    made = magis.why(net, batch, loss, optimizer, device=GPU, remedies=["lora", "8-bit-state"], pairs=False)
    assert {each.name for each in made.remedies} == {"lora", "8-bit-state"}
    assert {name: (id(each), each.requires_grad) for name, each in net.named_parameters()} == before
    assert not optimizer.state


def test_a_remedy_that_fails_is_one_line_and_the_others_go_on() -> None:
    net, (tokens, _), *_ = decoder()

    def loss(scores: Tensor, _tokens: Tensor) -> Tensor:
        summed: Tensor = OwnLoss.apply(scores)  # type: ignore[no-untyped-call]
        return summed

    made = magis.why(net, (tokens, tokens), loss, "adamw", device=GPU, remedies=["chunked-loss", "8-bit-state"])
    ((name, why),) = made.refused
    assert name == "chunked-loss"
    assert "autograd function of the user's own" in why
    assert f"not priced: chunked-loss: {why}" in str(made).splitlines()
    assert made.remedies[0].name == "8-bit-state"


def test_eight_bit_state_trains_as_adamw_does_and_is_a_quarter() -> None:
    ends = []
    for kind in (EightBitAdam, torch.optim.AdamW):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
        x = torch.randn(256, 64)
        y, update = x[:, :1].sin(), kind(net.parameters(), lr=3e-3, weight_decay=0.01)
        for _ in range(60):
            update.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            update.step()
        ends.append(float(loss.detach()))
    assert ends[0] < 2 * ends[1] < 0.01
    state = update_state(EightBitAdam)
    assert state == 2 * 64 * 128 + 2 * 4 * 64 * 128 // BLOCK


def update_state(kind: type[EightBitAdam]) -> int:
    weight = nn.Parameter(torch.randn(64, 128))
    update = kind([weight])
    weight.grad = torch.randn(64, 128)
    update.step()
    return sum(each.nbytes for each in update.state[weight].values() if isinstance(each, Tensor))


TEST = """
import pytest, torch
from torch import nn

@pytest.mark.magis
def test_net():
    net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
    return net, (torch.randn(4096, 64), torch.randn(4096, 64)), nn.functional.mse_loss
"""


def test_the_command_tells_of_a_marked_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_of_why.py"
    file.write_text(TEST, encoding="utf-8")
    asked = ["why", f"{file}::test_net", "--device", GPU, "--remedies", "accumulate4,amp", "--no-pairs"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "at the peak: " in shown
    assert "accumulate4" in shown
    assert main([*asked, "--memory-limit", "1 MiB"]) == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("no_file.py::test_net",), "there is no file no_file.py"),
        (("bert", "--device", GPU, "--remedies", "chekpoint"), "no remedy 'chekpoint' for this step"),
    ],
)
def test_bad_input_is_one_line(asked: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", *asked]) == 4
    (line,) = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("magis: "))  # progress
    assert said in line


def test_a_step_function_is_refused() -> None:
    with pytest.raises(UsageError, match="a step function has no remedies"):
        magis.why(lambda batch: None, torch.zeros(1), device=GPU)


def test_the_example_of_the_page_runs(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (repository / "docs" / "why.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/why.md", "exec"), {"__name__": "page"})
    out = capsys.readouterr().out
    assert "at the peak" in out
    assert re.search(r"^[a-z0-9 +-]+ \d+ [0-9.]+ (True|False) ", out, re.MULTILINE)


def test_micro_batches_of_batch_statistics_train_otherwise_and_stand_behind() -> None:
    def net() -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
        layers = (part for _ in range(3) for part in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()))
        return nn.Sequential(*layers), (torch.randn(2048, 64), torch.randn(2048, 64)), nn.functional.mse_loss

    found = magis.why(net, device=GPU, remedies=["accumulate4", "amp"], pairs=False)
    assert [each.name for each in found.remedies] == ["amp", "accumulate4"]
    assert found.remedy("accumulate4").needed_bytes < found.remedy("amp").needed_bytes
    assert "BatchNorm" in found.remedy("accumulate4").how
