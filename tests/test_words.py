"""Docstrings say what a thing is or does, and a private name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.layering import load

RIDDLES = ("What", "Whether", "How", "Of")
MOST = 4
"""Modules that may define the same private name."""


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring: of modules, classes and functions, and behind attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text
            for before, after in pairwise(node.body):
                match after:
                    case ast.Expr(ast.Constant(str(text))) if isinstance(before, (ast.Assign, ast.AnnAssign)):
                        yield after.lineno, text.strip()


def riddles(tree: ast.Module) -> list[int]:
    return [line for line, text in documented(tree) if text.split(maxsplit=1)[0].rstrip(",:") in RIDDLES]


def test_no_docstring_begins_with_a_riddle(repository: Path) -> None:
    found = [f"{each.name}:{line}" for each in load(repository).values() for line in riddles(each.tree)]
    assert found == []


def test_a_private_name_is_defined_in_few_modules(repository: Path) -> None:
    places = defaultdict[str, set[str]](set)
    for module in load(repository).values():
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] == "_" != node.name[1]:
                places[node.name].add(module.name)
    assert places
    assert {name: sorted(modules) for name, modules in places.items() if len(modules) > MOST} == {}


PLANTED = '''"""Kernels."""
X = 1
"""Whether it is."""
def f():
    """What is."""
class C:
    """Code."""
    y: int
    """Of x."""
'''


def test_a_planted_riddle_is_found() -> None:
    assert riddles(ast.parse(PLANTED)) == [3, 5, 9]
