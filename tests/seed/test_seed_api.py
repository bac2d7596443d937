"""The seed's API as it is called in the wild, on small sizes."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from magis.graph import parse, verify
from magis.results import CaseResult
from magis.testing import nn, run_optimization, setup_training_graph
from magis.testing.seed_api import TrainingGraph


def as_judged(result: CaseResult) -> str:
    """What the comparison of numbers should say: a plan with fission sums in another order than eager."""
    return "within tolerance" if result.search.fission else "bit-identical"


def tiny(update_weight: bool = True, inplace: bool = False) -> TrainingGraph:
    graph, output = nn.mlp(batch_size=384, inputs=16, hidden=256, layers=12)
    return setup_training_graph(graph, output, update_weight=update_weight, inplace=inplace)


def test_the_calls_of_the_seed_write_a_row_and_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("results.csv").open("a") as stream:
        for name in ("first", "second"):
            result = run_optimization(
                tiny(),
                name,
                mem_limit_ratio=0.8,
                time_budget=3 * 60,
                save_graph=True,
                dump_file=stream,
                dtype="float32",
            )
            assert result.numbers == as_judged(result)
    with Path("results.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["name"] for row in rows] == ["first", "second"]
    row = rows[0]
    assert row["opt-is-prof-result"] == row["ori-is-prof-result"] == "True"
    assert float(row["opt-memory"]) <= 0.8 * float(row["ori-memory"])
    assert float(row["opt-memory"]) == float(row["opt-simul-memory"])
    assert float(row["ori-memory"]) == float(row["ori-simul-memory"])
    graph = parse(Path("data/first.graph").read_text())
    verify(graph)
    assert json.loads(Path("data/first.json").read_text())["numbers"] == as_judged(result)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str) -> None:
    result = run_optimization(tiny(), "half", mem_limit_ratio=0.8, dtype=dtype)
    assert result.dtype == dtype
    assert result.numbers == as_judged(result)
    assert result.optimized.measured == result.optimized.simulated


def test_a_latency_limit_instead() -> None:
    result = run_optimization(tiny(), "latency", lat_limit_ratio=1.1)
    assert result.latency_limit_ms is not None
    assert result.memory_ratio < 1


def test_gradients_alone_are_kept_to_the_end() -> None:
    result = run_optimization(tiny(update_weight=False), "gradients", mem_limit_ratio=0.9)
    assert result.numbers == as_judged(result)
    assert result.optimized.measured == result.optimized.simulated


def test_inplace_lets_results_take_over_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts, fresh = {}, {}
    for inplace in (False, True):
        result = run_optimization(tiny(inplace=inplace), "net", lat_limit_ratio=1.0, save_graph=True)
        assert result.numbers == as_judged(result)
        assert result.optimized.measured == result.optimized.simulated
        graph = parse(Path("data/net.graph").read_text())
        counts[inplace] = Counter(op.target for op in graph.ops)
        fresh[inplace] = sum(each.nbytes for each in graph.storages.values() if each.kind == "temporary")
    assert counts[False]["aten.relu.default"] == counts[True]["aten.relu_.default"] == 12
    assert counts[False]["aten.relu_.default"] == counts[True]["aten.relu.default"] == 0
    # each ReLU, and each gradient of one, is 384 x 256 floats that are not allocated any more
    assert fresh[False] - fresh[True] == 24 * 384 * 256 * 4


def test_inplace_lowers_a_peak_that_lies_at_a_point_wise_operator() -> None:
    peaks = []
    for inplace in (False, True):
        graph, output = nn.resnet34(batch_size=8, image_size=64, width=16)
        graph = setup_training_graph(graph, output, update_weight=True, inplace=inplace)
        result = run_optimization(graph, "net", lat_limit_ratio=1.0, device="sim:rtx3090")
        peaks.append(result.memory.tensor_bytes)
    assert peaks[1] < peaks[0]
