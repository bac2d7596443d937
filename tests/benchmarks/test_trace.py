"""Timelines of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.chrome_trace import write_trace
from tests.nets import NETS
from tests.oracles import captured, graph_step


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


def test_one_step_and_all_of_its_operators_are_in_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    net = NETS["encoder-layer"].build()
    graph = captured(net).graph
    step = graph_step(graph, net)
    path = tmp_path / "step.json"
    path.write_text("old", encoding="utf-8")
    write_trace(path, step)
    names = [event["name"] for event in events(path) if event.get("cat") == "cpu_op"]
    wanted = [op.target for op in graph.ops if op.target.startswith("aten.addmm")]
    assert len(wanted) > 2
    assert names.count("aten::addmm") == len(wanted)  # once, not once for every step that ran
    spans = [event for event in events(path) if event.get("name") == "aten::addmm"]
    assert all(event["dur"] > 0 for event in spans)
    assert all("Input Dims" in event["args"] for event in spans)
    assert [file.name for file in tmp_path.iterdir()] == ["step.json"]
    assert "USDT" not in "".join(capfd.readouterr())
