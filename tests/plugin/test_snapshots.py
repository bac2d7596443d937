"""`--magis-snapshot`: files of each case that torch's memory_viz opens."""

from __future__ import annotations

import pytest

from tests.report.snapshot_reader import read

RUN = ("--magis-device=sim:h100", "--magis-snapshot=out/steps", "--magis-update=new")
TEST = """
import pytest
import torch
from torch import nn


@pytest.mark.magis(strategies=["eager"])
def test_step():
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    optimizer = torch.optim.AdamW(net.parameters())

    def step(batch):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    return step, torch.randn(128, 64)


def test_block(magis_peak):
    import magis

    with magis_peak("cpu") as p:
        with magis.phase("first"):
            torch.ones(1000)
    p.gate()
"""

WRITER = """

class Writer:
    @pytest.hookimpl(wrapper=True)
    def pytest_magis_run_case(self, snapshots):
        snapshots("original").write_text("")
        return (yield)


def pytest_configure(config):
    config.pluginmanager.register(Writer())
"""


def test_both_steps_of_each_case(gate):
    gate.use_real_core()
    result = gate(*RUN, "--magis-models=own_nets:sound", "--magis-memory-ratios=0.7")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["snapshots: *out/steps (3 files)"])
    eager, planned = gate.rows()
    folder = gate.root / "out/steps"
    found = {path.name.partition("@")[2]: read(path).peak_bytes for path in folder.iterdir()}
    peak = int(eager["ori peak bytes"])
    assert found == {
        "eager.original.pickle": peak,
        "magis-mem0.7.original.pickle": peak,
        "magis-mem0.7.optimized.pickle": int(planned["opt peak bytes"]),
    }


def test_step_functions_blocks_and_strategies_without_operators(gate):
    gate.use_real_core()
    (gate.root / "test_net.py").write_text(TEST)
    result = gate(*RUN, "--magis-models=own_nets:sound", "--magis-strategies=ddp", "test_net.py")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["snapshots: *out/steps (2 files)"])
    block, calls = sorted((gate.root / "out/steps").iterdir())
    assert (block.name, read(block).peak_bytes) == ("test_net.test_block@peak.original.pickle", 4000)
    assert read(calls).peak_bytes > 4000


def test_files_of_several_processes(gate, workers):
    gate.accept("--magis-models=bert")
    gate.extend_conftest(WRITER)
    result = gate("--magis-models=bert", "--magis-snapshot=out/steps", workers=workers)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["snapshots: *out/steps (3 files)"])
    assert len(list((gate.root / "out/steps").iterdir())) == 3


def test_a_core_without_snapshots_writes_none(gate):
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert", "--magis-snapshot=out/steps").assert_outcomes(passed=3)
    assert not (gate.root / "out").exists()


@pytest.mark.parametrize("name", ["step.pickle", "out/step.pkl"])
def test_a_file_in_place_of_a_directory_is_refused_in_one_line(gate, name):
    line = gate.refuses("--magis-models=bert", f"--magis-snapshot={name}")
    assert "--magis-snapshot: each case gets files of its own, not one step" in line
