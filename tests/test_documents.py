"""Documents that are made of the code: the reference is up to date, examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_the_reference_is_up_to_date(repository: Path) -> None:
    command = [sys.executable, "tools/reference.py", "--check"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run tools/reference.py and look at what git says\n{done.stderr}"


def test_the_examples_of_extending_run(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (repository / "docs" / "extending.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/extending.md", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"^aten\.addmm\.default +matmul +cut in 2 ways", said, re.MULTILINE)
    assert "sim:h200" in said
    assert re.search(r"^\d{3} bytes on rank 0$", said, re.MULTILINE)
    assert names["pytest_magis_strategies"](None)[0].name == "twice"


EXECUTED = {
    "docs/checkpoint-policy.md": "tests/compile/test_docs.py",
    "docs/ci.md": "tests/plugin/test_docs_ci.py",
    "docs/compile.md": "tests/compile/test_docs.py",
    "docs/extending.md": "tests/test_documents.py",
    "docs/fit.md": "tests/cli/test_fit.py",
    "docs/gate-my-model.md": "tests/plugin/test_guide.py",
    "docs/optimize.md": "tests/training/test_docs.py",
    "docs/report.md": "tests/plugin/test_docs_report.py",
}
"""Documents with Python examples -> the test that runs them."""
MADE_OF_CODE = {"docs/api.md"}


def test_every_document_with_examples_is_run_by_a_test(repository: Path) -> None:
    with_examples = {
        str(path.relative_to(repository))
        for path in (repository / "docs").glob("*.md")
        if re.search(r"^```python$", path.read_text(encoding="utf-8"), re.MULTILINE)
    } - MADE_OF_CODE
    assert with_examples - set(EXECUTED) == {"docs/rules.md"}  # a row of a table, run by its golden file
    for document, test in EXECUTED.items():
        assert Path(document).name in (repository / test).read_text(encoding="utf-8"), document
