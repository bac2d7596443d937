"""Marked tests that return a step function: the eager row of that step, clipping and all; plans are refused."""

from __future__ import annotations

TEST = """
import pytest
import torch
from torch import nn

WIDTH = 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def made(clips=True, leaks=False):
    net, losses = Net(), []
    optimizer = torch.optim.AdamW(net.parameters())

    def step(batch):
        inputs, targets = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if leaks:
            losses.append(loss)

    return step, (torch.randn(128, 64), torch.randn(128, 64))


@pytest.mark.magis(strategies=["eager"])
def test_step():
    return made()


@pytest.mark.magis(memory_ratios=[0.8])
def test_planned():
    return made()


@pytest.mark.magis(strategies=["eager"])
def test_leak():
    return made(leaks=True)
"""


def test_a_step_function_is_gated_as_it_is(gate):
    gate.use_real_core()
    test = gate.root / "test_memory.py"
    test.write_text(TEST)
    for where in ([], ["--magis-device=sim:h100"]):
        gate("test_memory.py::test_step", "--magis-update=new", *where).assert_outcomes(passed=1)
        gate("test_memory.py::test_step", *where).assert_outcomes(passed=1)
    stored = gate.baseline("test_memory.test_step")["configurations"]["small"]["cases"]["eager"]
    test.write_text(TEST.replace("WIDTH = 64", "WIDTH = 96"))
    result = gate("test_memory.py::test_step")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["worse: original tensor bytes: *", "grew at the peak: *net.up *"])
    assert stored["original_tensor_bytes"] > 128 * 64 * 4
    assert "Traceback" not in result.stdout.str()


def test_its_figures_are_those_of_the_estimate(gate):
    gate.use_real_core()
    (gate.root / "test_memory.py").write_text(TEST)
    (gate.root / "test_equal.py").write_text(
        """
import json, magis
from pathlib import Path
from test_memory import made


def test_it():
    found = magis.estimate(*made(), device="cpu")
    (stored,) = Path("baselines/cpu").glob("test_memory.test_step.json")
    case = json.loads(stored.read_text())["configurations"]["small"]["cases"]["eager"]
    assert case["original_tensor_bytes"] == found.at_peak.tensor_bytes
"""
    )
    gate("test_memory.py::test_step", "--magis-update=new").assert_outcomes(passed=1)
    gate("test_equal.py").assert_outcomes(passed=1)


def test_plans_and_leaks_of_a_step_function_are_refused_in_one_line(gate):
    gate.use_real_core()
    (gate.root / "test_memory.py").write_text(TEST)
    result = gate("test_memory.py", "--magis-update=new")
    result.assert_outcomes(passed=2, failed=2)
    said = (
        "test_memory.test_planned: a step function has no plan: magis plans (module, batch, loss), with an optimizer; "
    )
    assert f"{said}gate the step as it is, with strategies=['eager']" in result.outlines
    result.stdout.fnmatch_lines(["each call of the step leaves * more in memory; keep numbers, not tensors"])
    assert "Traceback" not in result.stdout.str()
