"""The picture of peak memory against throughput."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks.lib.scatter import Mark, scatter_svg

SVG = "{http://www.w3.org/2000/svg}"


def circles(text: str) -> dict[str, tuple[float, float]]:
    found = {}
    for circle in ET.fromstring(text).iter(f"{SVG}circle"):
        title = circle.find(f"{SVG}title")
        assert title is not None
        assert title.text is not None
        found[title.text.partition(":")[0]] = (float(circle.attrib["cx"]), float(circle.attrib["cy"]))
    return found


def test_faster_is_further_right_and_leaner_is_further_down() -> None:
    marks = [Mark("a", 10.0, 1000.0), Mark("b", 20.0, 500.0), Mark("c & d", 5.0, 2000.0, published=True)]
    places = circles(scatter_svg("t", marks))
    assert places["c & d"][0] < places["a"][0] < places["b"][0]
    assert places["c & d"][1] < places["a"][1] < places["b"][1]
    # both axes begin at 0: twice as much is twice as far from the corner
    left, bottom = 72.0, 384.0
    assert (places["b"][0] - left) == pytest.approx(2 * (places["a"][0] - left), abs=0.2)
    assert (bottom - places["c & d"][1]) == pytest.approx(2 * (bottom - places["a"][1]), abs=0.2)


def test_published_marks_are_hollow_and_words_do_not_lie_on_each_other() -> None:
    text = scatter_svg("t", [Mark(f"m{i}", 10.0, 1000.0, published=i == 0) for i in range(6)])
    assert len(re.findall(r'fill="white" stroke=', text)) == 1
    heights = [float(each) for each in re.findall(r'y="([\d.]+)"[^>]*>m\d</text>', text)]
    assert len(heights) == 6
    assert min(abs(a - b) for i, a in enumerate(heights) for b in heights[:i]) >= 11.9
