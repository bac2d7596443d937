"""What many cases leave behind in one process: nothing."""

from __future__ import annotations

import csv

import pytest

NETS = """
import pytest, torch
from torch import nn

@pytest.mark.parametrize("width", range(16, 16 + {count}))
@pytest.mark.magis(memory_ratios=[0.9], latency_tolerance=99)
def test_net(width):
    net = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 10))
    return net, (torch.randn(256, 64), torch.randint(0, 10, (256,))), nn.functional.cross_entropy
"""
WATCH = """
import csv, gc, os, resource

def pytest_runtest_logfinish(nodeid):
    if "eager" in nodeid:  # the model has more cases
        return
    import torch
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    pages = int(open("/proc/self/statm").read().split()[1])
    with open("watched.csv", "a") as file:
        csv.writer(file).writerow([len(alive), pages * resource.getpagesize()])
"""


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_no_tensor_outlives_its_case_and_memory_is_bounded(gate, count):
    """Two cases a network: 100 cases with 50."""
    gate.use_real_core()
    (gate.root / "test_nets.py").write_text(NETS.format(count=count))
    (gate.root / "conftest.py").write_text(WATCH)
    gate.in_subprocess("--magis-update=new").assert_outcomes(passed=2 * count)
    with (gate.root / "watched.csv").open() as file:
        rows = [(int(alive), int(nbytes)) for alive, nbytes in csv.reader(file)]
    assert len(rows) == count
    assert {alive for alive, _ in rows} == {0}
    settled = rows[min(9, count - 2)][1]  # by then everything is loaded and compiled
    assert rows[-1][1] - settled <= 64 * 2**20
