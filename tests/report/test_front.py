"""Fronts as text and as pictures."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from magis.report import front_svg, front_text
from magis.results import FrontPoint, ParetoFront

EAGER = FrontPoint(1000, 10.0, 0, 0, "")
FRONT = ParetoFront(
    "bert", "sim:rtx3090", "paper", "float32", 0, EAGER, 200,
    (FrontPoint(300, 14.0, 9, 64, 'from "a" <b> & back in 2 parts'), FrontPoint(500, 11.0, 3, 0, ""),
     FrontPoint(900, 10.0, 0, 0, "")),
    1234, 1.5,
)  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def test_the_text_holds_everything() -> None:
    read = json.loads(front_text(FRONT))
    assert read["schema"] == 1
    assert read["original"] == {
        "peak_bytes": 1000, "latency_ms": 10.0, "recomputed_ops": 0, "swapped_bytes": 0, "fission": "",
    }  # fmt: skip
    assert [point["peak_bytes"] for point in read["points"]] == [300, 500, 900]
    assert read["points"][0]["fission"] == FRONT.points[0].fission
    assert (read["lower_bound_bytes"], read["states"], read["seconds"]) == (200, 1234, 1.5)


def circles(front: ParetoFront) -> list[tuple[float, float]]:
    """Centres of the points, in the order of the front; the last one is eager."""
    root = ET.fromstring(front_svg(front))
    return [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in root.iter(f"{SVG}circle")]


def test_the_picture_shows_every_point_where_it_belongs() -> None:
    *points, eager = circles(FRONT)
    assert len(points) == 3
    slow, middle, fast = points
    assert slow[0] > middle[0] > fast[0] == eager[0]
    assert slow[1] > middle[1] > fast[1] > eager[1]
    # linear: 10% lies at a quarter of 40%, and 0.5 half-way between nothing and eager
    assert middle[0] - eager[0] == pytest.approx((slow[0] - eager[0]) / 4, abs=0.11)
    bottom = eager[1] + (middle[1] - eager[1]) * 2
    assert slow[1] - eager[1] == pytest.approx((bottom - eager[1]) * 0.7, abs=0.2)


@pytest.mark.parametrize(
    ("limits", "peak"),
    [
        ({"memory_ratio": 0.6}, 500),
        ({"memory_ratio": 1.0}, 900),
        ({"latency_ratio": 1.1}, 500),
        ({"latency_ratio": 2.0}, 300),
        ({"memory_ratio": 0.95, "latency_ratio": 1.05}, 900),
        ({"memory_ratio": 0.1}, None),
        ({"latency_ratio": 0.9}, None),
    ],
)
def test_the_best_point_within_limits(limits: dict[str, float], peak: int | None) -> None:
    best = FRONT.best(**limits)
    assert (best.peak_bytes if best else None) == peak
