"""The gate on simulated GPUs, nothing made up: changes planted in a network, as a commit would make them.

`benchmarks/planted.py` does the same at the sizes of the paper.
"""

from __future__ import annotations

import re
import shutil

import pytest

from magis.units import format_bytes

NET = """
import torch
from torch import nn
from torch.nn import functional

WIDTH, LAYERS, BATCH = 1024, 14, 8192


class Layer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.down(functional.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self, inner=4 * WIDTH, again=0, kept=()):
        super().__init__()
        self.layers = nn.ModuleList(Layer(inner if i == 3 else 4 * WIDTH) for i in range(LAYERS))
        self.again, self.kept = again, kept

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 0 and self.again:
                with torch.no_grad():  # a teacher, say, for so many rows: nothing of it stays
                    x = x.add_(layer(x[: self.again]).mean())
            if i in self.kept:
                x = x + torch.tanh(x)  # keeps its result for the backward pass
        return x


def net():
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    return Net(CHANGES), (x,), (y,), functional.mse_loss
"""
DEVICE = "sim:h200"
RUN = ("--magis-models=planted_net:net", f"--magis-device={DEVICE}", "--magis-memory-ratios=0.8", "--magis-budget=100")
KINDS = ("worse: ", "better: ", "new: ", "broken: ")
SEEN = re.compile(
    r"worse: original (?P<what>.+?): (?P<seen>[\d,]+) .*, allowed (?P<allowed>[\d,]+) .*?(?P<percent>\+[\d.]+)%"
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the baseline of the unchanged network stays, for the tests after the first one."""
    return tmp_path_factory.mktemp("planted")


@pytest.fixture
def planted(gate, kept):
    """Gate the network with a change, given as arguments of its class, against the baseline without any."""
    gate.use_real_core()

    def run(changes, *options):
        (gate.root / "planted_net.py").write_text(NET.replace("CHANGES", changes))
        return gate(*RUN, *options)

    if not (kept / "baselines").exists():
        assert run("", "--magis-update=new").ret == 0
        shutil.copytree(gate.root / "baselines", kept / "baselines")
        shutil.copyfile(gate.root / "results.csv", kept / "results.csv")
    else:
        shutil.copytree(kept / "baselines", gate.root / "baselines")
    return run


def rows_before(gate, kept):
    return [dict(row) for row in gate.rows(kept / "results.csv")]


def change_of(gate, kept, column):
    """By what share a column of the original grew."""
    return float(gate.rows()[0][column]) / float(rows_before(gate, kept)[0][column]) - 1


def findings(result):
    return [line for line in result.outlines if line.startswith(KINDS)]


def said_of_eager(result):
    """The findings on the first case: the plan of the other one may change with anything."""
    of_eager, _, _ = result.stdout.str().partition("[magis-mem0.8] _")
    return [line for line in of_eager.splitlines() if line.startswith(KINDS)]


def test_three_percent_slower_is_red_at_the_same_peak(gate, kept, planted):
    result = planted("again=BATCH")
    result.assert_outcomes(failed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert 0.025 < change_of(gate, kept, "ori-simul-latency") < 0.035
    assert change_of(gate, kept, "ori peak bytes") == 0
    found = SEEN.match(findings(result)[0])
    assert found is not None
    assert found["what"] == "simulated latency"
    seen, allowed = (int(found[name].replace(",", "")) for name in ("seen", "allowed"))
    assert seen == round(float(gate.rows()[0]["ori-simul-latency"]) * 1e6)
    assert allowed == int(round(float(rows_before(gate, kept)[0]["ori-simul-latency"]) * 1e6) * 1.01)
    assert float(found["percent"]) == pytest.approx(100 * (seen / allowed - 1), abs=0.06)
    result.stdout.fnmatch_lines(["accept with: pytest --magis-models=planted_net:net * --magis-update=worse"])
    assert sum("latency" in line for line in findings(result)) == 2  # one of each case
    allowed = planted("again=BATCH", "--magis-strategies=eager", "--magis-latency-tolerance=0.05")
    allowed.assert_outcomes(passed=1)


FLOATS = 4 * 8192 * 1024
"""Bytes of what a layer hands on."""
GREW = {
    # the result, the weight and the bias of the wider layer; what GELU makes of it; the weight that takes that
    "inner=4 * WIDTH + 512": [
        f"layers.3.up +{format_bytes(FLOATS // 2 + 512 * 4 * 1025)} (1 activation at planted_net.py:16, 2 parameters)",
        f"layers.3 +{format_bytes(FLOATS // 2)} (2 activations at planted_net.py:16)",
        f"layers.3.down +{format_bytes(512 * 4 * 1024)} (2 parameters)",
    ],
    # tanh keeps its result and the sum lives on; what layer 2 made is no longer needed
    "kept=(2,)": [
        f"(no sub-module) +{format_bytes(2 * FLOATS)} (3 activations at planted_net.py:32)",
        f"others {format_bytes(-FLOATS)}",
    ],
}


@pytest.mark.parametrize("changes", GREW, ids=["wider", "kept"])
def test_one_percent_more_memory_is_red_hardly_slower_and_explained(gate, kept, planted, changes):
    result = planted(changes)
    result.assert_outcomes(failed=2)
    assert 0.005 < change_of(gate, kept, "ori peak bytes") < 0.015
    assert change_of(gate, kept, "ori-simul-latency") < 0.01
    found = SEEN.match(findings(result)[0])
    assert found is not None
    assert found["what"] == "tensor bytes"
    assert int(found["seen"].replace(",", "")) == int(gate.rows()[0]["ori peak bytes"])
    assert ["latency" in line for line in said_of_eager(result)] == [False]
    why = next(line for line in result.outlines if line.startswith("grew at the peak: "))
    where = "; the peak is at aten.sum.dim_IntList of layers.13.down (backward, planted_net.py:16)"
    assert why == f"grew at the peak: {', '.join(GREW[changes])}{where}"
    assert why in gate.rows()[0]["note"]


def test_slower_by_less_than_the_tolerance_is_green(gate, kept, planted):
    result = planted("again=BATCH // 4", "--magis-strategies=eager")
    assert 0.001 < change_of(gate, kept, "ori-simul-latency") < 0.01
    result.assert_outcomes(passed=1)
    assert findings(result) == []
