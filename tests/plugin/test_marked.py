"""Tests of users that are marked: an item for every case, gated like the models of `--magis-models`."""

from __future__ import annotations

import pytest

MARKED = """
import pytest

@pytest.mark.magis(memory_ratios=[0.8, 0.6])
def test_net():
    return None  # the made-up core builds nothing

def test_other():
    assert True
"""


@pytest.fixture
def marked(gate):
    (gate.root / "test_memory.py").write_text(MARKED)
    return gate


def lines(result, start):
    return [line for line in result.outlines if line.startswith(start)]


def test_each_case_is_an_item(marked):
    result = marked("--collect-only", "-q")
    assert lines(result, "test_memory") == [
        "test_memory.py::test_net[eager]",
        "test_memory.py::test_net[magis-mem0.8]",
        "test_memory.py::test_net[magis-mem0.6]",
        "test_memory.py::test_other",
    ]
    assert marked.calls() == []


def test_without_a_baseline_they_are_red_and_say_how_to_make_one(marked, workers):
    result = marked(workers=workers)
    result.assert_outcomes(failed=3, passed=1)
    assert lines(result, "new: no baseline in baselines/cpu/test_memory.test_net.json")
    assert lines(result, "create it with: pytest 'test_memory.py::test_net[magis-mem0.6]' --magis-update=new")
    assert lines(result, "accept everything that can be: pytest test_memory.py --magis-update=new")
    assert not (marked.root / "results.csv").exists()
    assert not (marked.root / "baselines").exists()


def test_accepted_they_are_green_until_memory_grows(marked, workers):
    marked.accept()
    assert marked.baseline("test_memory.test_net")["configurations"]["small"]["cases"].keys() == {
        "eager", "magis-mem0.8", "magis-mem0.6",
    }  # fmt: skip
    marked("--magis-csv=rows.csv", workers=workers).assert_outcomes(passed=4)
    assert [row["name"] for row in marked.rows("rows.csv")] == ["test_memory.test_net"] * 3
    marked.fake(any_case={"ori_tensor": 1.1, "ori_peak": 1.1})
    result = marked(workers=workers)
    result.assert_outcomes(failed=3, passed=1)
    assert lines(result, "worse: original tensor bytes")
    command = "accept with: pytest 'test_memory.py::test_net[magis-mem0.8]' --magis-update=worse"
    assert lines(result, command)
    accepted = marked("test_memory.py::test_net[magis-mem0.8]", "--magis-update=worse")
    accepted.assert_outcomes(passed=1)
    marked().assert_outcomes(failed=2, passed=2)


def test_options_fill_what_the_mark_leaves_open(marked):
    (marked.root / "test_memory.py").write_text(
        "import pytest\n@pytest.mark.magis\ndef test_net(): ...\n"
        "@pytest.mark.magis(latency_ratios=1.1, strategies='magis')\ndef test_fast(): ...\n"
    )
    result = marked("--collect-only", "-q", "--magis-memory-ratios=0.5")
    assert lines(result, "test_memory") == [
        "test_memory.py::test_net[eager]",
        "test_memory.py::test_net[magis-mem0.5]",
        "test_memory.py::test_fast[magis-lat1.1]",
    ]


def test_marks_of_classes_own_parameters_and_names(gate):
    (gate.root / "tests").mkdir()
    (gate.root / "tests" / "test_nets.py").write_text(
        "import pytest\n@pytest.mark.magis(memory_ratios=[0.8], strategies=['magis'])\nclass TestNets:\n"
        "    @pytest.mark.parametrize('width', [64, 'a/b'])\n    def test_wide(self, width): ...\n"
        "    @pytest.mark.magis(name='our-net', memory_ratios=[0.6])\n    def test_named(self): ...\n"
    )
    result = gate("--magis-update=new")
    result.assert_outcomes(passed=3)
    assert [call[0] for call in gate.calls()] == [
        "tests.test_nets.TestNets.test_wide-64[magis-mem0.8]",
        "tests.test_nets.TestNets.test_wide-a/b[magis-mem0.8]",
        "our-net[magis-mem0.6]",
    ]
    assert sorted(path.name for path in (gate.root / "baselines" / "cpu").iterdir()) == [
        "our-net.json",
        "tests.test_nets.TestNets.test_wide-64.json",
        "tests.test_nets.TestNets.test_wide-a%2Fb.json",
    ]


LATE = """
import unittest
import pytest

@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.magis), 2])
def test_parameter(width): ...

def test_hook(): ...

@pytest.mark.magis
class TestOld(unittest.TestCase):
    def test_old(self): ...
"""
HOOK = """
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_hook":
            item.add_marker("magis")
"""


def test_a_mark_that_makes_no_cases_is_red(gate, workers):
    (gate.root / "test_memory.py").write_text(LATE)
    (gate.root / "conftest.py").write_text(HOOK)
    result = gate(workers=workers)
    result.assert_outcomes(errors=3, passed=1)
    for name in ("test_parameter[1]", "test_hook", "TestOld::test_old"):
        assert lines(result, f"test_memory.py::{name}: its mark 'magis' made no cases"), result.stdout.str()


def test_two_networks_of_one_name_are_red(gate, workers):
    (gate.root / "test_memory.py").write_text(
        "import pytest\n@pytest.mark.magis(name='net', strategies='eager')\nclass TestNets:\n"
        "    def test_one(self): ...\n    def test_two(self): ...\n"
    )
    result = gate("--magis-update=new", workers=workers)
    result.assert_outcomes(failed=2)
    assert lines(result, "@pytest.mark.magis: the network of test_memory.TestNets.test_two is called 'net' too")
    assert not (gate.root / "baselines").exists()


CHECKED = """
import torch

def test_net(magis):
    net = torch.nn.Linear(2, 2)
    found = magis.check(net, (torch.ones(1, 2), torch.ones(1, 2)), torch.nn.functional.mse_loss, memory_ratios=[0.8])
    assert list(found) == ["eager", "magis-mem0.8"]
    assert found["eager"].memory.peak_bytes > 0
    magis.check(lambda: None, strategies=["eager"])
"""


def test_the_fixture_gates_what_a_test_has_at_hand(gate):
    run = gate.in_subprocess  # torch is imported: each run in a process of its own
    (gate.root / "test_memory.py").write_text(CHECKED)
    result = run()
    result.assert_outcomes(failed=1)
    assert lines(result, "test_memory.test_net[magis-mem0.8]:")
    assert lines(result, "create it with: pytest test_memory.py::test_net --magis-update=new")
    run("--magis-update=new").assert_outcomes(passed=1)
    assert (gate.root / "baselines" / "cpu" / "test_memory.test_net.json").is_file()
    assert (gate.root / "baselines" / "cpu" / "test_memory.test_net.2.json").is_file()
    gate.fake(**{"test_memory.test_net.2[eager]": {"ori_tensor": 1.1, "ori_peak": 1.1}})
    result = run("-n2")
    result.assert_outcomes(failed=1)
    assert lines(result, "test_memory.test_net.2[eager]:")


REAL = """
import pytest, torch
from torch import nn

def batch():
    return torch.randn(32, 16), torch.randint(0, 4, (32,))

def net(width=32):
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 4))

calls = []

@pytest.mark.magis(memory_ratios=[0.95], latency_tolerance=9)
def test_net():
    calls.append(1)
    return net(), batch(), nn.functional.cross_entropy

def test_was_built_twice():
    assert len(calls) == 2  # on fake tensors and on real ones, whatever the number of cases

@pytest.mark.magis(memory_ratios=[0.95], device="sim:h200")
def test_huge():
    return net(2**22), batch(), nn.functional.cross_entropy  # 350 MiB of weights, 1.5 GiB in all: never made

def test_hand(magis):
    module = net()
    adam = torch.optim.Adam(module.parameters(), lr=0.1)
    weights = [weight.clone() for weight in module.parameters()]
    magis.check(module, batch(), loss=nn.functional.cross_entropy, optimizer=adam, strategies=["eager"])
    assert all(torch.equal(*pair) for pair in zip(weights, module.parameters()))

def test_hand_in_another_type(magis):
    module = net()
    weights = [weight.clone() for weight in module.parameters()]
    magis.check(module, batch(), loss=nn.functional.cross_entropy, dtype="bfloat16", strategies=["eager"])
    assert all(weight.dtype == torch.float32 for weight in module.parameters())
    assert all(torch.equal(*pair) for pair in zip(weights, module.parameters()))

@pytest.mark.magis(strategies=["eager"])
def test_none():
    net()

@pytest.mark.magis(strategies=["eager"])
def test_own_error():
    raise ValueError("mine")

@pytest.mark.magis(strategies=["eager"])
def test_mixed():
    return net().double(), batch(), nn.functional.cross_entropy
"""


def test_real_networks(gate):
    gate.use_real_core()
    (gate.root / "test_memory.py").write_text(REAL)
    result = gate("--magis-update=new")
    result.assert_outcomes(passed=7, failed=3)
    assert lines(result, "test_memory.test_none: the test returned a NoneType; return a magis.api.Workload, (module, ")
    assert lines(result, "E       ValueError: mine")
    assert any(
        "mixed data types: aten.addmm.default in module '0' is given float32 and float64" in line
        for line in result.outlines
    )
    assert [path.name for path in sorted((gate.root / "baselines" / "sim-h200").iterdir())] == [
        "test_memory.test_huge.json"
    ]
