"""`--magis-models=package.module:factory` on the real core: what only building, capturing or running can find.

The kinds of mistakes are all told apart in tests/api/test_check.py.
"""

from __future__ import annotations

import pytest

BAD = {
    "own_nets:branches": "own_nets:branches: the step depends on the data of a tensor (*) in module * at own_nets.py:*",
    "own_nets:on_two_devices": "own_nets:on_two_devices: 1.weight is on device meta; *",
    "own_nets:two_types": "own_nets:two_types: mixed data types: aten.addmm.default in module '1' is given *",
    "own_nets:mixed_norm": "own_nets:mixed_norm: RuntimeError at own_nets.py:* in eager mode: mixed dtype *",
    "own_nets:without_parameters": "own_nets:without_parameters: there is nothing to train: no parameter requires *",
    "own_nets:raises": "own_nets:raises: the factory failed: OSError: no such checkpoint anywhere",
    "own_nets:leaves": "own_nets:leaves: the factory called exit (SystemExit: this factory gives up)",
    "own_nets:nosuch": "own_nets:nosuch: own_nets has no attribute 'nosuch'; *",
    "own_nets.nosuch:net": "own_nets.nosuch:net: cannot import own_nets.nosuch: ModuleNotFoundError: *",
}
ON_CPU = ("--magis-device=cpu", "--magis-update=new")
SIMULATED = ("--magis-device=sim:rtx3090", "--magis-strategies=eager", "--magis-update=new")


def refused(gate, model, *, workers=0):
    line = gate.refuses(f"--magis-models=own_nets:sound,{model}", *ON_CPU, workers=workers)
    pytest.LineMatcher([line]).fnmatch_lines([f"ERROR: {BAD[model]}"])


@pytest.mark.parametrize("model", BAD)
def test_a_bad_model_is_one_line_and_nothing_is_written(gate, model):
    gate.use_real_core()
    refused(gate, model)


@pytest.mark.parametrize(
    "choice",
    [
        ["--deselect=magis::own_nets:branches[eager]"],
        ["magis::own_nets:sound[eager]"],
        ["-k", "not branches", "-n2"],
    ],
    ids=["deselect", "node-id", "k-n2"],
)
def test_a_model_that_is_not_chosen_does_no_harm(gate, choice):
    gate.use_real_core()
    gate("--magis-models=own_nets:sound,own_nets:branches", *SIMULATED, *choice).assert_outcomes(
        passed=1, deselected=0 if "-n2" in choice or choice[0].startswith("magis::") else 1
    )
    assert [row["name"] for row in gate.rows()] == ["own_nets:sound"]


def test_an_operator_that_nobody_declared_runs(gate, workers):
    gate.use_real_core()
    arguments = ("--magis-models=own_nets:undeclared", "--magis-memory-ratios=0.8", "--magis-budget=500", *ON_CPU)
    gate(*arguments, "--magis-csv-full", workers=workers).assert_outcomes(passed=2)
    eager, optimized = gate.rows()
    assert eager["name"] == "own_nets:undeclared"
    assert optimized["numbers"] == "bit-identical"
    assert optimized["opt-is-prof-result"] == "True"
    assert optimized["opt-memory"] == optimized["opt-simul-memory"]
    assert int(optimized["opt peak bytes"]) <= 0.8 * int(eager["ori peak bytes"])


@pytest.mark.parametrize("name", ["in_bfloat16", "wide_buffer", "reads_data"])
def test_a_model_is_gated_in_the_data_type_that_it_was_built_with(gate, name):
    gate.use_real_core()
    arguments = (f"--magis-models=own_nets:{name}", "--magis-memory-ratios=0.95", "--magis-budget=300", *ON_CPU)
    gate(*arguments, "--magis-csv-full").assert_outcomes(passed=2)
    assert {row["dtype"] for row in gate.rows()} == {"bfloat16" if name == "in_bfloat16" else "float32"}
    assert gate.rows()[1]["numbers"] == "bit-identical"
    assert gate.rows()[1]["opt-memory"] == gate.rows()[1]["opt-simul-memory"]


OPTIMIZERS = """
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


def test_optimizers_of_any_class_are_gated_like_any_other(gate):
    gate.use_real_core()
    (gate.root / "test_memory.py").write_text(OPTIMIZERS)
    gate.accept()
    gate("--magis-csv=rows.csv", "--magis-csv-full").assert_outcomes(passed=4)
    rows = gate.rows("rows.csv")
    assert [row["numbers"] for row in rows] == ["bit-identical"] * 4
    for row in rows:
        for step in ("ori", "opt"):
            assert row[f"{step} memory error bytes (simulated - measured)"] == "0"
        assert row["verdict"] == "pass"
