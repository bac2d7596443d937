"""A tensor planted in Llama 3 8B, found by clicking in the page of its step: `python benchmarks/viewer.py`.

Layer 17 computes its activation function in float32, as one line of a change may do. The step of
benchmarks/estimate_llama.py is predicted with and without it, on a simulated H100, and two pages are written: that of
the step, and that of both steps. A real Chromium opens each at 400 and 1,280 pixels, dark and light. In the first page
the end of the forward is clicked on the curve, then the modules down to the layer; in the second one, always the row
with the largest difference; then the tensor is looked up by the search. Seconds are those from the call that opens the
page to the row with the tensor in it. Bytes on the page must be those of the estimate. Needs transformers, playwright
and Chromium.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import torch
from estimate_llama import DEVICE, make
from torch import nn

import magis
from magis.frontends.estimating import Estimate
from magis.units import format_bytes

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
SETTINGS = [(width, scheme) for width in (400, 1280) for scheme in ("dark", "light")]
LAYER = 17
PLANTED = "float32[1, 2048, 14336]"
MODULE = f"model.layers.{LAYER}.mlp.act_fn"
MOST_SECONDS = 5.0


class Widened(nn.Module):
    """SiLU in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x.float()).to(x.dtype)


def planted() -> tuple[Any, ...]:
    """Llama 3 8B with the activation function of one layer in float32."""
    net, *others = make()
    net.model.layers[LAYER].mlp.act_fn = Widened()
    return net, *others


class Tab:
    """A page in the browser, as somebody who clicks sees it."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.errors = page, list[str]()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text))
        self.started = time.perf_counter()
        page.goto(path.as_uri())

    def seconds(self) -> float:
        """Seconds since the page was opened. Raises RuntimeError for errors of its script, and a page that scrolls."""
        spent = time.perf_counter() - self.started
        wide = self.page.evaluate("document.documentElement.scrollWidth > innerWidth")
        if self.errors or wide:
            raise RuntimeError(f"the page has errors, or is too wide: {self.errors}")
        return spent

    def click_time(self, ms: float) -> None:
        """Click on the first curve at a time."""
        curve = self.page.locator("svg.curve").first
        end = float(self.page.locator(".plot").first.locator(".x").last.text_content().split()[0])
        box = curve.bounding_box()
        curve.click(position={"x": box["width"] * ms / end, "y": box["height"] / 2})

    def rows(self) -> list[list[str]]:
        """Texts of the table's cells: a name, then bytes."""
        found = self.page.locator("table.alive tbody tr").evaluate_all(
            "rows => rows.map(row => Array.from(row.cells).map(cell => cell.textContent))"
        )
        return [[str(cell) for cell in row] for row in found]

    def open(self, name: str) -> None:
        """Click on a module or a kind, unless the page has opened it already."""
        button = self.page.locator("table.alive").get_by_role("button", name=name, exact=True).first
        if button.get_attribute("aria-expanded") == "false":
            button.click()

    def kinds(self) -> dict[str, str]:
        """Bytes by kind at the moment, as shown."""
        texts = self.page.locator(".keys button").all_text_contents()
        return dict(re.fullmatch(r"([a-z ]+) (\d.*)", text).groups() for text in texts)


def find_by_modules(tab: Tab, ms: float) -> float:
    """Click on a time, then down the modules; return seconds until the row with the tensor is there."""
    tab.click_time(ms)
    for name in (*MODULE.split("."), "activation"):
        tab.open(name)
    tab.page.locator("table.alive tr.leaf", has_text=PLANTED).first.wait_for(timeout=5000)
    return tab.seconds()


def find_by_difference(tab: Tab, ms: float) -> float:
    """Click on a time, then on the first row that is closed, which moved most, until it is a tensor."""
    tab.click_time(ms)
    while True:
        first = tab.page.locator("table.alive tbody tr:not(.sum)").filter(
            has=tab.page.locator("[aria-expanded=false], .soft")
        )
        button = first.first.locator("button").first
        if button.get_attribute("aria-expanded") is None:
            break
        button.click()
    if PLANTED not in (button.text_content() or ""):
        raise RuntimeError(f"the largest difference is {button.text_content()}")
    return tab.seconds()


def find_by_search(tab: Tab) -> float:
    """Search for the module, and click on what is found first."""
    tab.page.get_by_role("searchbox").first.fill(f"{LAYER}.mlp.act_fn float32")
    tab.page.locator(".hits button").first.click()
    tab.page.locator("table.alive tr.chosen", has_text=PLANTED).wait_for(timeout=5000)
    return tab.seconds()


def differences(tab: Tab, step: Estimate) -> Iterator[str]:
    """Yield what the page shows at the peak that is not what the estimate says."""
    of = {"parameters": "parameter", "optimizer state": "state", "activations": "activation", "gradients": "gradient"}
    of |= {"updates": "update"}
    wanted = {name: format_bytes(step.by_kind.get(kind, 0)) for name, kind in of.items()}
    shown = tab.kinds()
    yield from (f"{name}: {shown.get(name)}, not {text}" for name, text in wanted.items() if shown.get(name) != text)
    modules: Counter[str] = Counter()
    for row in step.at_peak.held:
        modules[row.module.partition(".")[0] or "(no sub-module)"] += row.nbytes
    rows = {name: nbytes for name, nbytes, *_ in tab.rows()}
    if rows["all"] != format_bytes(step.peak_bytes):
        yield f"all: {rows['all']}, not {format_bytes(step.peak_bytes)}"
    for module, nbytes in modules.items():
        if rows.get(module) != format_bytes(nbytes):
            yield f"{module}: {rows.get(module)}, not {format_bytes(nbytes)}"


def end_of_forward(step: Estimate) -> float:
    """Milliseconds at which the forward ends."""
    lives = step.lives()
    phases = [lives.words[lives.calls[call][2]] for call in lives.run]
    return lives.ends[phases.index("backward") - 1] / 1e6


def main() -> None:
    """Write both pages, open them at all settings, and print a table."""
    parser = arguments(__doc__)
    parser.add_argument("--keep", metavar="DIR", type=Path, help="write pages and pictures of them here")
    asked = parser.parse_args()
    from playwright.sync_api import sync_playwright

    folder = asked.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    plain, wide = (magis.estimate(each, device=DEVICE, allocator="") for each in (make, planted))
    one, both = folder / "step.html", folder / "both.html"
    started = time.perf_counter()
    wide.save_report(one)
    written = time.perf_counter() - started
    wide.save_report(both, before=plain)
    sizes = [f"{path.stat().st_size / 2**20:.2f} MiB" for path in (one, both)]
    ms, lives = end_of_forward(wide), wide.lives()
    printed(head(f"the page of the step: {sizes[0]}, written in {written:.1f} s; of both steps: {sizes[1]}"))
    print(f"{len(lives.born)} tensors, {len(lives.run)} calls; planted: {PLANTED} of {MODULE}")
    print(f"{'pixels':>6} {'scheme':6} {'by modules':>11} {'by difference':>14} {'by search':>10}  numbers")
    slowest, wrong = 0.0, 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for width, scheme in SETTINGS:

            def opened(path: Path, size: int = width, colours: str = scheme) -> Tab:
                return Tab(browser.new_page(viewport={"width": size, "height": 800}, color_scheme=colours), path)

            tab = opened(one)
            unlike = list(differences(tab, wide))
            tab.page.screenshot(path=folder / f"peak-{width}-{scheme}.png", full_page=True)
            tab = opened(one)
            spent = [find_by_modules(tab, ms)]
            tab.page.screenshot(path=folder / f"found-{width}-{scheme}.png", full_page=True)
            other = opened(both)
            spent.append(find_by_difference(other, ms))
            other.page.screenshot(path=folder / f"both-{width}-{scheme}.png", full_page=True)
            third = opened(one)
            spent.append(find_by_search(third))
            slowest, wrong = max(slowest, *spent), wrong + len(unlike)
            said = "; ".join(unlike) or "those of the estimate"
            print(f"{width:6} {scheme:6} {spent[0]:9.2f} s {spent[1]:12.2f} s {spent[2]:8.2f} s  {said}")
        browser.close()
    if slowest > MOST_SECONDS or wrong:
        raise SystemExit(f"the slowest took {slowest:.1f} s; {wrong} numbers are wrong")


if __name__ == "__main__":
    main()
