"""Networks of a user's with optimizers of any class, through the gate in earnest."""

from __future__ import annotations

OWN = """
import pytest, torch
from torch import nn, optim

class Lion(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            parameter.sub_(moment.lerp_(parameter.grad, 0.1).sign(), alpha=1e-3)

@pytest.mark.parametrize("kind", [optim.RMSprop, optim.Adagrad, optim.NAdam, Lion])
@pytest.mark.magis(memory_ratios=[0.8], latency_tolerance=9, budget=100, strategies=["magis"])
def test_net(kind):
    module = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 4))
    batch = torch.randn(256, 32), torch.randint(0, 4, (256,))
    return module, batch, nn.functional.cross_entropy, kind(module.parameters())
"""


def test_they_are_gated_like_any_other(gate):
    gate.use_real_core()
    (gate.root / "test_memory.py").write_text(OWN)
    gate.accept()
    gate("--magis-csv=rows.csv").assert_outcomes(passed=4)
    rows = gate.rows("rows.csv")
    assert [row["numbers"] for row in rows] == ["bit-identical"] * 4
    for row in rows:
        for step in ("ori", "opt"):
            assert row[f"{step} memory error bytes (simulated - measured)"] == "0"
        assert row["verdict"] == "pass"
