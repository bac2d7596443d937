"""Memory that grows from step to step is red, with the place; what a step keeps without growing is not."""

from __future__ import annotations

import pytest

TEST = """
import pytest
import torch
from torch import nn

ONE = pytest.mark.magis(strategies=["eager"])


class Net(nn.Module):
    def __init__(self, how=""):
        super().__init__()
        self.linear, self.how, self.kept, self.last = nn.Linear(64, 64), how, [], None

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.how == "tensor":
            self.kept.append(y.detach())
        if self.how == "graph":
            self.kept.append((y * x).sum())
        if self.how == "last":
            self.last = y.detach()
        return y


class Late(torch.optim.SGD):
    def __init__(self, parameters, at):
        super().__init__(parameters, 0.1)
        self.steps, self.at = 0, at

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        if self.steps == self.at:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["late"] = torch.zeros_like(parameter)
        return super().step(closure)


def made(net, *optimizer):
    return net, (torch.randn(32, 64), torch.randn(32, 64)), nn.functional.mse_loss, *optimizer


@ONE
@pytest.mark.parametrize("how", ["tensor", "graph"])
def test_grows(how):
    return made(Net(how))


@ONE
def test_late():
    net = Net()
    return made(net, Late(net.parameters(), 3))


@ONE
@pytest.mark.parametrize("how", ["", "last"])
def test_sound(how):
    return made(Net(how))


@ONE
def test_adam():
    net = Net()
    return made(net, torch.optim.Adam(net.parameters()))


@ONE
def test_first_step():
    net = Net()
    return made(net, Late(net.parameters(), 1))
"""
GREW = "memory grows from step to step: "


@pytest.fixture
def real(gate):
    gate.use_real_core()
    (gate.root / "test_memory.py").write_text(TEST)
    return gate


@pytest.mark.parametrize("device", ["cpu", "sim:h100"])
def test_what_grows_is_red_with_its_place_until_it_is_accepted(real, device):
    where = f"--magis-device={device}"
    result = real("test_memory.py", where, "--magis-update=new")
    result.assert_outcomes(passed=4, failed=3)
    said = result.stdout.str()
    assert f"worse: {GREW}16.00 KiB more are alive after step 4 than after step 2, made in Net (2 tensors at " in said
    assert (
        f"worse: {GREW}16.25 KiB more are alive after step 4 than after step 2, made in no sub-module (2 tensors "
        in said
    )
    lines = [line for line in result.outlines if GREW in line and "made in Net (" in line and "tensor" in line]
    assert {line.partition("tensors at ")[2].partition(")")[0] for line in lines} == {
        "test_memory.py:15",
        "test_memory.py:19",
    }
    accepted = ("test_memory.py::test_late", where)
    real(*accepted, "--magis-update=new,worse").assert_outcomes(passed=1)
    real(*accepted).assert_outcomes(passed=1)
    stored = real.baseline("test_memory.test_late", device.replace(":", "-"))["configurations"]["small"]["cases"]
    assert stored["eager"]["growth_bytes"] == 16640
    sound = real.baseline("test_memory.test_adam", device.replace(":", "-"))["configurations"]["small"]["cases"]
    assert "growth_bytes" not in sound["eager"]


def test_reference_cycles_are_growth_at_any_number_of_blocks(gate):
    """Steps of few objects do not start Python's garbage collector."""
    gate.use_real_core()
    (gate.root / "test_memory.py").write_text(CYCLES)
    result = gate("test_memory.py", "--magis-update=new")
    result.assert_outcomes(failed=3)
    said = [line for line in result.outlines if line.startswith(f"worse: {GREW}")]
    for blocks, line in zip((1, 2, 3), said, strict=True):
        grown = f"{2 * 8 * blocks}.00 KiB"
        assert f": {grown} more are alive after step 4 than after step 2, made in Sequential.0 (2 tensors at " in line
        assert line.endswith(f"; {grown} are in reference cycles until Python's collector runs")


CYCLES = """
import pytest
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        found = {"output": torch.tanh(self.linear(x))}
        found["itself"] = found
        return found["output"]


@pytest.mark.magis(strategies=["eager"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_net(blocks):
    net = nn.Sequential(*(Block() for _ in range(blocks)))
    return net, (torch.randn(32, 64), torch.randn(32, 64)), nn.functional.mse_loss
"""
