"""The commands of docs/report.md run as they stand, one after another, and print what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CHANGE = "`make(inner=2048)`"


def test_the_examples_run(gate, repository: Path) -> None:
    gate.use_real_core()
    text = (repository / "docs" / "report.md").read_text(encoding="utf-8")
    (net,) = re.findall(r"^```python\n# net.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert text.count(CHANGE) == 1
    before, _, after = text.partition(CHANGE)
    for program, page in ((net, before), (net.replace("inner=1024)", "inner=2048)"), after)):
        (gate.root / "net.py").write_text(f"# net.py\n{program}")
        for block in re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
            for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
                check(gate, command, expected.splitlines())
    assert "net.py:12" in (gate.root / "report.html").read_text()
    (reading,) = re.findall(r"^```python\n(import magis\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", reading], cwd=gate.root, capture_output=True, text=True, timeout=60, check=True
    )
    assert "accepted worse bytes" in " ".join(done.stdout.split())


def check(gate, command: str, expected: list[str]) -> None:
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "pytest"]:
        result = gate("-p", "pytest_benchmark.plugin", *words[3:])
        printed = result.stdout.str()
        red = any(line.startswith("worse: ") for line in expected)
        assert result.ret == (pytest.ExitCode.TESTS_FAILED if red else pytest.ExitCode.OK), printed
    else:
        assert words[0] == "pytest-benchmark"
        program = "from pytest_benchmark.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program, *words[1:]],
            cwd=gate.root, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        printed = done.stdout
    lines = [line.rstrip().replace(f"{gate.root}/", "") for line in printed.splitlines()]
    assert expected
    assert [line for line in expected if line not in lines] == [], printed
