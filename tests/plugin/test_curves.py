"""Memory over time in the report: stacked, with a limit, on equal axes; and the page in a browser."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from magis.results import Span
from magis.units import MIB
from pytest_magis.outputs.html.curves import PANEL, WIDTH, Curves
from tests.plugin.pages import Page, measured

CSS = (files("pytest_magis.outputs.html") / "page.css").read_text(encoding="utf-8")


def span(at: int, *kinds: int, stream: str = "compute") -> Span:
    return Span("aten.mm.default", "up", "forward", "", float(at), 1.0, sum(kinds), stream, kinds=kinds)


ORIGINAL = [span(at, 4 * MIB, 0, MIB, held * MIB, 0, 0, 1) for at, held in enumerate((1, 9, 9, 3))]
OPTIMIZED = [span(at, 4 * MIB, 0, MIB, 2 * MIB, 0, 0, 0) for at in range(7)]
CURVES = Curves(
    {"original": ORIGINAL, "optimized": [*OPTIMIZED, span(9, 0, 0, 0, 0, 0, 0, 0, stream="to host")]}, 8 * MIB
)


def page_of(curves: Curves) -> Page:
    return Page(f'<!DOCTYPE html>\n<html lang="en">{curves.html(0, "of <mine>")}</html>')


def levels(path: str) -> list[float]:
    """Heights of an area above the lower edge of its panel."""
    base = float(re.findall(r"M0 (\d+)", path)[0])
    return [base - float(y) for y in re.findall(r"V([\d.]+)", path)]


def test_bytes_are_stacked_by_kind_on_equal_axes() -> None:
    page = page_of(CURVES)
    paths = [(attributes["class"], attributes["d"]) for tag, attributes in page.tags if tag == "path"]
    assert [kind for kind, _ in paths] == ["k6", "k3", "k2", "k0"] * 2  # no state, no gradients
    assert CURVES.bytes_scale.end == 16 * MIB
    mib = PANEL / 16
    heights = [levels(path or "") for _, path in paths]
    assert heights[0] == pytest.approx([mib * each for each in (6, 14, 8, 0)], abs=0.06)
    assert heights[1] == heights[0]  # a byte of scratch shows nowhere
    assert heights[2:4] == [pytest.approx([mib * 5, 0], abs=0.06), pytest.approx([mib * 4, 0], abs=0.06)]
    assert heights[4] == heights[5] == pytest.approx([mib * 7, 0], abs=0.06)
    ends = [float(re.findall(r"H([\d.]+)V\d+Z", path or "")[0]) for _, path in paths]
    assert ends == [pytest.approx(0.4 * WIDTH)] * 4 + [pytest.approx(0.7 * WIDTH)] * 4
    assert [kind for kind in ("parameters", "optimizer state", "activations", "scratch") if kind in page.text] == [
        "parameters", "activations", "scratch",
    ]  # fmt: skip


def test_a_picture_has_a_title_and_a_description() -> None:
    page = page_of(CURVES)
    ((_, svg),) = [each for each in page.tags if each[0] == "svg"]
    named = {attributes["id"]: tag for tag, attributes in page.tags if "id" in attributes}
    assert (named[svg["aria-labelledby"] or ""], named[svg["aria-describedby"] or ""]) == ("title", "desc")
    assert (svg["role"], svg["tabindex"]) == ("img", "0")
    assert "of <mine> original: at most 14.00 MiB; optimized: at most 7.00 MiB; memory limit 8.00 MiB" in page.text


# --- colours ----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", ["text", "soft", "red", "green", "link"])
def test_words_can_be_read_on_both_grounds_in_light_and_dark(name: str) -> None:
    colours = {key: pair for key, *pair in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", CSS)}
    for mode in (0, 1):
        for ground in ("back", "panel"):
            assert contrast(colours[name][mode], colours[ground][mode]) >= 4.5


# --- in a browser -----------------------------------------------------------------------------------------------------

BOXES = """
const shown = function (elements) {
  return Array.from(elements).map(function (each) { return [each.textContent, each.getBoundingClientRect()]; })
    .filter(function ([, box]) { return box.width > 0; });
};
const clashes = function (elements) {
  const boxes = shown(elements);
  return boxes.flatMap(function ([words, a], at) {
    return boxes.slice(at + 1).filter(function ([, b]) {
      return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    }).map(function ([other]) { return words + " / " + other; });
  });
};
"""


TEXTS = """
const texts = page.querySelectorAll("text");
return {words: shown(texts).map(function ([words]) { return words; }), clashes: clashes(texts)};
"""


@pytest.fixture
def report(gate) -> Path:
    """Of a run with a limit, long names, tables and a front."""
    long = "a_module_with_a_long_name." * 6
    gate.fake(any_case={"held": {f"{long}{at}": 1000 * at + 1 for at in range(30)}})
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert", "--magis-report=report.html", "--magis-pareto=fronts")
    return gate.root / "report.html"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["budget_curve", "fission", "front", "strategies"])
def test_no_label_of_a_picture_in_the_docs_lies_on_another(tmp_path, name):
    picture = Path(__file__).parents[2] / "docs" / f"{name}.svg"
    found = measured(picture.read_text(encoding="utf-8"), BOXES + TEXTS, tmp_path, 800)
    assert len(found["words"]) > 10
    assert found["clashes"] == []
