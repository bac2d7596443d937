"""Pages of predicted steps: `Estimate.save_report`; and what a browser shows of them, where there is one."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import magis
from magis.errors import UsageError
from magis.plain_records import from_plain
from magis.results import TensorLives
from magis.units import format_bytes
from tests.plugin.pages import Page, measured


class Block(nn.Module):
    def __init__(self, saves: int = 0) -> None:
        super().__init__()
        self.up, self.down, self.saves = nn.Linear(32, 128), nn.Linear(128, 32), saves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        for _ in range(self.saves):
            y = y.exp()
        return x + self.down(y)


def estimated(*saves: int, device: str = "cpu", **given: Any) -> magis.Estimate:
    net = nn.Sequential(*map(Block, saves))
    batch = torch.randn(64, 32), torch.randn(64, 32)
    return magis.estimate(net, batch, nn.functional.mse_loss, "adamw", device=device, **given)


def data_of(path: Path) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("device", ["cpu", "sim:h100"])
def test_a_page_holds_every_tensor_and_says_where_it_is_from(device: str, tmp_path: Path) -> None:
    step = estimated(0, 2, device=device)
    step.save_report(tmp_path / "step.html")
    page = Page((tmp_path / "step.html").read_text(encoding="utf-8"))
    assert page.count("script") == 2
    for words in (
        f"device {device} (float32) torch {metadata.version('torch')}",
        "revision",
        "date",
        "command",
        *str(step).splitlines()[:3],
    ):
        assert words in page.text
    data = data_of(tmp_path / "step.html")
    assert data["views"] == [{"names": ["step"], "steps": [0], "limit": None}]
    lives = from_plain(TensorLives, data["steps"][0])
    assert lives == step.lives()
    held = [
        sum(n for b, d, n in zip(lives.born, lives.dies, lives.nbytes, strict=True) if b <= at <= d) + lives.scratch[at]
        for at in range(len(lives.run))
    ]
    assert max(held) == step.peak_bytes
    assert device == "cpu" or lives.ends[-1] / 1e6 == pytest.approx(step.latency_ms)


def test_the_page_of_a_step_function_is_one_call(tmp_path: Path) -> None:
    net = Block()
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x: torch.Tensor) -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = magis.estimate(step, torch.randn(64, 32), device="cpu")
    lives = found.lives()
    kinds = {lives.words[kind] for kind in lives.kind}
    assert {"parameter", "state", "batch", "activation", "gradient"} <= kinds
    names = [lives.words[lives.calls[call][0]] for call in lives.run]
    assert names.count("aten.tanh.default") == 1
    held = [
        sum(n for b, d, n in zip(lives.born, lives.dies, lives.nbytes, strict=True) if b <= at <= d) + lives.scratch[at]
        for at in range(len(lives.run))
    ]
    assert max(held) == found.peak_bytes


def test_compiled_steps_and_impossible_places_are_refused_in_one_line(tmp_path: Path) -> None:
    step = estimated(0)
    with pytest.raises(UsageError, match=re.escape(tmp_path.name)):
        step.save_report(tmp_path)
    compiled = estimated(0, compiled=True)
    with pytest.raises(UsageError, match=r"^lives: a compiled step is not predicted operator by operator"):
        compiled.save_report(tmp_path / "step.html")


def test_modules_of_keyword_batches_have_the_names_that_the_user_wrote() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sum()

    step = magis.estimate(Keyed(), {"x": torch.randn(8, 32)}, optimizer="adamw", device="cpu")
    assert {row.module for row in step.at_peak.held} <= {"", "inner", "inner.up", "inner.down"}
    assert "inner.up" in {row.module for row in step.at_peak.held if row.kind == "parameter"}


CLICKS = """
const table = page.querySelector("table.alive");
const cells = function () {
  return Array.from(table.querySelectorAll("tbody tr")).map(function (row) {
    return Array.from(row.cells).map(function (cell) { return cell.textContent; });
  });
};
const shown = {total: cells()[0], curves: page.querySelectorAll("svg.curve").length};
shown.wide = page.documentElement.scrollWidth > page.documentElement.clientWidth;
for (let click = 0; click < 9; click += 1) {
  const closed = Array.from(table.querySelectorAll("tbody tr:not(.sum)")).find(function (row) {
    return row.className.startsWith("leaf") || row.querySelector("[aria-expanded=false]");
  });
  if (closed.className.startsWith("leaf")) { shown.leaf = closed.textContent; break; }
  closed.querySelector("button").click();
}
const search = page.querySelector("input");
search.value = "aten.exp 1";
search.dispatchEvent(new page.defaultView.Event("input"));
shown.hits = Array.from(page.querySelectorAll(".hits button")).map(function (each) { return each.textContent; });
page.querySelector(".hits button").click();
shown.chosen = table.querySelector(".chosen").textContent;
shown.life = Array.from(page.querySelectorAll(".life"), function (each) { return each.getAttribute("visibility"); });
const before = page.querySelector(".moment").textContent;
page.querySelector("svg.curve").dispatchEvent(new page.defaultView.KeyboardEvent("keydown", {key: "Home"}));
shown.moved = page.querySelector(".moment").textContent !== before;
return shown;
"""


@pytest.mark.parametrize("width", [400, 1280])
def test_what_moved_is_found_by_clicks_and_by_search(width: int, tmp_path: Path) -> None:
    before, now = estimated(0, 0, device="sim:h100"), estimated(0, 1, device="sim:h100")
    now.save_report(tmp_path / "both.html", before=before)
    found = measured((tmp_path / "both.html").read_text(encoding="utf-8"), CLICKS, tmp_path, width)
    assert not found["wide"]
    assert found["curves"] == 2
    assert found["total"][:3] == ["all", format_bytes(before.peak_bytes), format_bytes(now.peak_bytes)]
    assert re.match(r"float32\[64, 128\] aten\.exp\.default at tests/report/test_viewer\.py:\d+", found["leaf"])
    assert len(found["hits"]) == 1
    assert "activation of 1: float32[64, 128] aten.exp.default" in found["hits"][0]
    assert "aten.exp.default" in found["chosen"]
    assert found["life"] == ["hidden", "visible"]
    assert found["moved"]
