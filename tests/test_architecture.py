"""Both packages keep their layers, start-up is light, and the checker finds planted violations."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.layering import FACADE, MOST_LINES, PACKAGES, load, violations

HEAVY = ("torch", "numpy", "pandas", "numba", "rustworkx", "scipy")  # never loaded by pytest's start-up


def test_the_house_is_in_order(repository: Path) -> None:
    assert load(repository).keys() >= {FACADE, "magis.errors"}, "nothing was checked"
    found = violations(repository)
    assert not found, "\n".join(found)


def test_all_warnings_can_only_be_read(repository: Path) -> None:
    """They hold names of users: `magis.printable.warn` writes them."""
    places = (path for package in PACKAGES for path in (repository / package).rglob("*.py"))
    assert [path.name for path in places if "warnings.warn" in path.read_text(encoding="utf-8")] == ["printable.py"]


@pytest.mark.parametrize("folder", ["benchmarks", "tests", "tools"])
def test_what_programs_import_of_the_project_exists(repository: Path, folder: str) -> None:
    """Programs that no test runs break unseen when a name goes."""
    paths = sorted((repository / folder).rglob("*.py"))
    assert paths
    missing = [
        f"{path.relative_to(repository)}:{node.lineno}: {node.module} has no {alias.name}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES
        for alias in node.names
        if not exists(str(node.module), alias.name)
    ]
    assert not missing, "\n".join(missing)


def exists(module: str, name: str) -> bool:
    """Whether `from module import name` finds something."""
    return hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("module", ["magis", "pytest_magis", "pytest_magis.plugin"])
def test_start_up_loads_nothing_heavy(module: str, fresh_python: Callable[[str], str]) -> None:
    assert heavy_loaded(f"import {module}", fresh_python) == []


def test_the_facade_loads_no_other_module(fresh_python: Callable[[str], str]) -> None:
    program = "import sys, magis; print(*(name for name in sys.modules if name.startswith('magis.')))"
    assert fresh_python(program).split() == []


def heavy_loaded(program: str, fresh_python: Callable[[str], str]) -> list[str]:
    """Which of HEAVY a fresh interpreter has loaded after `program`."""
    return fresh_python(f"{program}\nimport sys\nprint(*(m for m in {HEAVY!r} if m in sys.modules))").split()


# --- the checks themselves: a clean tree passes, every planted violation is found ---------------------------

CLEAN = {
    "magis/__init__.py": "__all__ = ['optimize']\n",
    "magis/errors.py": "__all__ = ['MagisError']\nclass MagisError(Exception): ...\n",
    "magis/units.py": "from magis.errors import MagisError\n__all__ = ['GIB']\nGIB = 2**30\n",
    "magis/results.py": "__all__ = ['Row']\nfrom .units import GIB\n",
    "magis/graph/__init__.py": "from magis.graph.graph import Graph\n",
    "magis/graph/graph.py": "import rustworkx\nfrom magis import __version__, errors\nclass Graph: ...\n",
    "magis/runtime/__init__.py": "from magis.results import Row\nfrom magis.graph import Graph\n",
    "magis/capture/__init__.py": "def capture():\n    from magis.graph import Graph\n",
    "magis/search/__init__.py": "import magis.capture\nfrom ..graph.graph import Graph\n",
    "magis/api.py": "import magis.search\n__all__ = ['optimize']\ndef optimize(): ...\ndef hidden(): ...\n",
    "pytest_magis/__init__.py": "",
    "pytest_magis/plugin.py": "import pytest\nimport magis.api\nfrom magis import units, api as a\n"
    "from magis.errors import MagisError\nfrom pytest_magis import options\n"
    "magis.api.optimize(a.optimize, units.GIB)\n",
    "pytest_magis/options.py": "def options(): ...\n",
}

PLANTED = {
    "upward": ("magis/graph/graph.py", "from magis.search import plan", "magis.graph.graph:1: imports magis.search"),
    "in a function": (
        "magis/graph/graph.py",
        "def f():\n    import magis.api",
        "magis.graph.graph:2: imports magis.api",
    ),
    "for types only": (
        "magis/graph/graph.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from magis.search import State",
        "magis.graph.graph:3: imports magis.search",
    ),
    "relative": ("magis/graph/graph.py", "from ..search import State", "magis.graph.graph:1: imports magis.search"),
    "by name": (
        "magis/graph/graph.py",
        "import importlib\nimportlib.import_module('magis.search')",
        "magis.graph.graph:2: imports magis.search",
    ),
    "by the name of a factory": (
        "magis/graph/graph.py",
        "ABOVE = {'x': 'magis.search:make'}",
        "magis.graph.graph:1: imports magis.search",
    ),
    "plugin from below": ("magis/api.py", "import pytest_magis.options", "magis.api:1: imports pytest_magis.options"),
    "same row": ("magis/runtime/cpu.py", "import magis.capture", "magis.runtime.cpu:1: imports magis.capture"),
    "no layer": ("magis/helpers.py", "", "magis.helpers:1: has no layer"),
    "facade": ("magis/graph/graph.py", "from magis import optimize", "magis.graph.graph:1: imports the facade"),
    "cycle": ("magis/graph/graph.py", "from magis.graph import Graph", "import cycle: magis.graph"),
    "cycle of submodules": (
        "magis/units.py",
        "def f():\n    from magis.units.more import x",
        "magis.units:1: import cycle",
    ),
    "itself": ("magis/errors.py", "import magis.errors", "magis.errors:1: imports itself"),
    "star": ("magis/runtime/cpu.py", "from magis.graph import *", "magis.runtime.cpu:1: star import"),
    "assert": ("magis/graph/graph.py", "assert True", "magis.graph.graph:1: assert statement"),
    "except": (
        "pytest_magis/options.py",
        "try: ...\nexcept (ValueError, AssertionError): ...",
        "pytest_magis.options:2: AssertionError caught",
    ),
    "suppress": (
        "pytest_magis/options.py",
        "import contextlib\nwith contextlib.suppress(AssertionError): ...",
        "pytest_magis.options:2: AssertionError suppressed",
    ),
    "global": ("magis/graph/graph.py", "x = 1\ndef f():\n    global x", "magis.graph.graph:3: global x"),
    "pytest": (
        "magis/graph/graph.py",
        "def f():\n    from _pytest import nodes",
        "magis.graph.graph:2: magis imports _pytest",
    ),
    "private module": ("pytest_magis/plugin.py", "from magis.graph import Graph", "plugin:1: uses magis.graph, which"),
    "unlisted name": ("pytest_magis/plugin.py", "from magis.api import hidden", "plugin:1: uses magis.api.hidden"),
    "attribute": ("pytest_magis/plugin.py", "import magis.api\nmagis.api.hidden()", "plugin:2: uses magis.api.hidden"),
    "attribute of an alias": (
        "pytest_magis/plugin.py",
        "from magis import api as a\na.hidden.more",
        "plugin:2: uses magis.api.hidden",
    ),
    "module by attribute": (
        "pytest_magis/plugin.py",
        "import magis\nmagis.graph.Graph",
        "plugin:2: uses magis.graph, which",
    ),
    "no __all__": ("magis/api.py", "def optimize(): ...", "magis.api:1: is public but has no literal `__all__`"),
    "a module's name twice": ("magis/search/units.py", "", "magis.units:1: module units is in magis.search.units, too"),
    "a class twice": ("magis/units.py", "class Graph: ...", "magis.units:1: class Graph is in magis.graph.graph, too"),
    "long": ("tests/test_x.py", "x = 1\n" * (MOST_LINES + 1), "tests/test_x.py:421: more than 420 lines"),
}


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    write(tmp_path, CLEAN | {"tests/test_x.py": "x = 1\n" * MOST_LINES})
    assert violations(tmp_path) == []


@pytest.mark.parametrize(("path", "text", "expected"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, text: str, expected: str) -> None:
    more = {"magis/units/more.py": "import magis.units"} if "units.more" in text else {}
    write(tmp_path, {**CLEAN, **more, path: text})
    assert any(expected in line for line in violations(tmp_path)), violations(tmp_path)


def test_a_heavy_import_is_seen(fresh_python: Callable[[str], str]) -> None:
    assert heavy_loaded("import numpy", fresh_python) == ["numpy"]
