"""`magis fit`: what it prints, exit codes, the examples of docs/fit.md, and one line for whatever is wrong."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from magis.cli.main import USAGE_ERROR, main

STACK = "tests.api.fit_nets:stack"


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "docs" / "fit.md").read_text(encoding="utf-8")


def test_the_examples_run(page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    module, package = ModuleType("my_package.nets"), ModuleType("my_package")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "my_package", package)
    monkeypatch.setitem(sys.modules, "my_package.nets", module)
    names: dict[str, Any] = module.__dict__
    assert "budget=1000" in block
    exec(compile(block.replace("budget=1000", "budget=50"), "docs/fit.md", "exec"), names)
    eager, optimized, ratio = capsys.readouterr().out.split()
    assert int(eager) < int(optimized)
    assert float(ratio) >= 1.0
    (line,) = re.findall(r"^\$ magis (.*)$", page, re.MULTILINE)
    assert main([*shlex.split(line), "--budget", "20", "--most", "80", "--precision", "0.5"]) == 0
    assert "my_package.nets:make_net on sim:h200, float32, dimension 0, at most 64.00 MiB" in capsys.readouterr().out


def test_every_option_is_in_the_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help", "--magis-device"}
    rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
    options -= {"--magis-preset", "--magis-dtype"}
    assert options <= set(re.findall(r"--[a-z-]+", rows))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([STACK], "the following arguments are required: --memory-limit"),
        ([STACK, "--memory-limit", "8 G"], "not an amount of memory: '8 G'"),
        (["all", "--memory-limit", "1 MiB"], "'all' stands for 7 models; name one: resnet50"),
        (["brt", "--memory-limit", "1 MiB"], "unknown model 'brt'"),
        ([STACK, "--memory-limit", "1 MiB", "--dim", "x"], "--dim: 'x' is not a whole number"),
        ([STACK, "--memory-limit", "1 MiB", "--latency-ratio", "fast"], "--latency-ratio: 'fast' is not a number"),
        (
            [STACK, "--memory-limit", "1 MiB", "--latency-ratio", "nan"],
            "latency_ratio=nan; give a number that is at least 1",
        ),
        ([STACK, "--memory-limit", "1 MiB", "--most", "0"], "most=0; give a whole number that is at least 1"),
        ([STACK, "--memory-limit", "1 MiB", "--keyword", "rows"], "takes no keyword 'rows'; it takes batch_size"),
        ([STACK, "--memory-limit", "1 MiB", "--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments]) == USAGE_ERROR
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("ERROR: ")
    assert message in said
