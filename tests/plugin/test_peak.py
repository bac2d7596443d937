"""`magis.peak()` in tests: stored, green, red with the place that grew, and bad use in one line."""

from __future__ import annotations

import re

import pytest

TEST = """
import pytest
import torch
import magis

SIZE = 1000


class Twice(torch.nn.Module):
    def forward(self, x):
        return x * 2


def test_net(magis_peak):
    with magis_peak("cpu") as p:
        for _ in range(3):
            kept = Twice()(torch.ones(SIZE))
    p.gate("generate", tolerance=0.01)
    with magis_peak("cpu") as p:
        torch.ones(10)
    p.gate()


def test_without_the_fixture():
    with magis.peak("cpu") as p:
        torch.ones(SIZE // 10)
    p.gate()
"""
WRONG = """
import torch, magis


def test_same_name():
    with magis.peak("cpu") as p:
        torch.ones(3)
    p.gate("a")
    p.gate("a")


def test_name():
    with magis.peak("cpu") as p:
        torch.ones(3)
    p.gate("a/b")


def test_tolerance():
    with magis.peak("cpu") as p:
        torch.ones(3)
    p.gate(tolerance=-1)


def test_nothing():
    with magis.peak("cpu") as p:
        pass
    p.gate()


def test_raised():
    with magis.peak("cpu") as p:
        raise ValueError("theirs")


def test_early():
    with magis.peak("cpu") as p:
        torch.ones(3)
        p.gate("early")


def test_caught():
    try:
        with magis.peak("cpu") as p:
            raise ValueError("theirs")
    except ValueError:
        print(p)
    p.gate("caught")
"""


@pytest.fixture
def real(gate):
    gate.use_real_core()
    (gate.root / "test_memory.py").write_text(TEST)
    return gate


def test_stored_then_green_then_red_with_its_place(real):
    real("test_memory.py").assert_outcomes(failed=2)
    real.accept("test_memory.py")
    stored = real.baseline("test_memory.test_net")["configurations"]["small"]["cases"]
    assert {name: case["original_tensor_bytes"] for name, case in stored.items()} == {
        "peak": 40,
        "peak-generate": 12000,
    }
    real("test_memory.py").assert_outcomes(passed=2)
    (real.root / "test_memory.py").write_text(TEST.replace("SIZE = 1000", "SIZE = 1009"))  # within the tolerance
    result = real("test_memory.py")
    result.assert_outcomes(passed=2)
    (real.root / "test_memory.py").write_text(TEST.replace("SIZE = 1000", "SIZE = 1020"))
    result = real("test_memory.py")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "worse: block tensor bytes: 12,240 (11.95 KiB), allowed 12,120 (11.84 KiB), +1.0%",
            "grew at the peak: Twice +160 B (2 tensors at test_memory.py:11), (no sub-module) +80 B (*",
            "accept with: pytest test_memory.py::test_net --magis-update=worse",
        ]
    )
    real.accept("test_memory.py", update="worse")
    real("test_memory.py", workers=2).assert_outcomes(passed=2)


def test_bad_use_fails_its_test_in_one_line(real):
    (real.root / "test_memory.py").write_text(WRONG)
    result = real("test_memory.py", "--magis-update=new")
    result.assert_outcomes(failed=7)
    result.stdout.fnmatch_lines_random(
        [
            "magis.peak: gate: this test has gated a block called 'a' already*",
            "magis.peak: gate: name: 'a/b' cannot be a name*",
            "magis.peak: gate: tolerance: '-1' is not a share such as 0.05 (it must not be negative)",
            "magis.peak: the block made no tensor on cpu: there is nothing to gate",
            "E*ValueError: theirs",
            "magis.peak: there are no figures: its block is still running",
            "magis.peak: there are no figures: its block raised ValueError",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert "UsageError" not in result.stdout.str()


def test_a_run_of_its_own_says_how(real):
    (real.root / "alone.py").write_text(
        "import magis, torch\nwith magis.peak('cpu') as p:\n    torch.ones(3)\np.gate()\n"
    )
    result = real.pytester.runpython(real.root / "alone.py")
    assert result.ret == 1
    assert "magis.peak: gate() works in a pytest test only" in result.stderr.str()


def test_the_tests_of_the_page_run_as_they_stand(real, repository):
    text = (repository / "docs" / "peak.md").read_text(encoding="utf-8")
    (real.root / "test_memory.py").write_text(
        "\n\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    )
    real.accept("test_memory.py")
    real("test_memory.py").assert_outcomes(passed=5)
    stored = real.baseline("test_memory.test_training_and_evaluation")["configurations"]["small"]["cases"]
    assert list(stored) == ["peak-loop", "peak-loop.evaluation", "peak-loop.training"]
