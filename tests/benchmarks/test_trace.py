"""Timelines of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.lib.chrome_trace import write_trace
from magis.errors import UsageError
from tests.nets import NETS
from tests.oracles import captured, differences, graph_step, history


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


def test_three_steps_are_run(tmp_path: Path) -> None:
    net = NETS["batch-norm"].build()
    graph = captured(net).graph
    traced, plain = graph_step(graph, net), graph_step(graph, net)
    write_trace(tmp_path / "step.json", traced)
    history(plain, 3)
    assert differences(history(plain, 1), history(traced, 1)) == []


def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    class Never:
        def prepare(self) -> None:
            pytest.fail("it ran")

    with pytest.raises(UsageError, match="cannot write"):
        write_trace(tmp_path / "missing" / "step.json", Never())  # type: ignore[arg-type]


def test_a_step_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    class Failing:
        def prepare(self) -> None:
            pass

        def run(self) -> Tensor:
            raise ZeroDivisionError

    path = tmp_path / "step.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(ZeroDivisionError):
        write_trace(path, Failing())  # type: ignore[arg-type]
    assert path.read_text(encoding="utf-8") == "old"
    assert len(list(tmp_path.iterdir())) == 1
