"""The table of lines by room: every tracked file of both packages is counted once, and the sums add up."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.layering import NEIGHBOURS, PACKAGES


@pytest.fixture(scope="module")
def size(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("size_tool", repository / "tools" / "size.py")
    if spec is None or spec.loader is None:
        raise ImportError("tools/size.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sums_of_the_table_add_up(repository: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=repository, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git working tree")
    command = [sys.executable, "tools/size.py"]
    printed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout
    rows = {name: int(lines.replace(",", "")) for name, lines in (row.rsplit(None, 1) for row in printed.splitlines())}
    sources = [path for path in map(Path, listed.stdout.splitlines()) if path.parts[0] in PACKAGES]
    assert rows["everything"] == sum(len((repository / path).read_text("utf-8").splitlines()) for path in sources)
    assert rows["core"] + rows["neighbours"] == rows["everything"]
    assert rows["neighbours"] == sum(rows[f"neighbour {name}"] for name in NEIGHBOURS)
    rooms = [name for name in rows if name.split(".")[0] in PACKAGES]
    assert rows["core"] == sum(rows[name] for name in rooms)
    assert min(rows.values()) > 0
    assert {"magis.graph", "magis.search", "pytest_magis", "tests", "benchmarks"} <= rows.keys()


def test_lines_are_counted_by_room(size: ModuleType, tmp_path: Path) -> None:
    for name, lines in {"magis/a.py": 2, "pytest_magis/against.py": 3, "tests/test_a.py": 5, "conftest.py": 7}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * lines)
    paths = ["magis/a.py", "pytest_magis/against.py", "tests/test_a.py", "conftest.py"]
    table = size.table(size.lines_by_room(tmp_path, paths))
    assert {name: lines for name, lines in table.items() if lines} == {
        "magis": 2,
        "core": 2,
        "neighbour versions": 3,
        "neighbours": 3,
        "everything": 5,
        "tests": 5,
    }
