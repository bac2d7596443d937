"""Colours of the report, and pictures of the docs in a browser."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from tests.plugin.pages import measured

CSS = (files("pytest_magis.outputs.html") / "page.css").read_text(encoding="utf-8")


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


@pytest.mark.soak
@pytest.mark.parametrize("name", ["budget_curve", "fission", "front", "strategies"])
def test_no_label_of_a_picture_in_the_docs_lies_on_another(tmp_path, name):
    picture = Path(__file__).parents[2] / "docs" / f"{name}.svg"
    found = measured(picture.read_text(encoding="utf-8"), BOXES + TEXTS, tmp_path, 800)
    assert len(found["words"]) > 10
    assert found["clashes"] == []
