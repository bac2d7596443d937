"""Compiled functions have one version each: numba's cache on disk can mix up two (see ``magis.simulate.kernel``)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPILED = "numba.njit"


def compiled(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """The compiled functions of a module."""
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(COMPILED in ast.unparse(each) for each in node.decorator_list)
    }


def literals(text: str) -> Iterator[str]:
    """Calls between compiled functions for which numba takes an argument for a literal, as ``caller: call``.

    That is a constant, or a variable that a constant is given to and nothing is added to before the call.
    """
    functions = compiled(ast.parse(text))
    for name, function in functions.items():
        nodes = list(ast.walk(function))
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                if any(_is_literal(each) or _is_constant(each, nodes) for each in given):
                    yield f"{name}: {ast.unparse(node)}"


def _is_literal(given: ast.expr | None) -> bool:
    return isinstance(given.operand if isinstance(given, ast.UnaryOp) else given, ast.Constant)


def _is_constant(given: ast.expr, nodes: list[ast.AST]) -> bool:
    """Whether a variable may still have the constant that it was given."""
    if not isinstance(given, ast.Name):
        return False
    set_at = [line for name, line in _set_to_literals(nodes) if name == given.id]
    added_at = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == given.id
    ]
    return any(not any(line < added < given.lineno for added in added_at) for line in set_at if line <= given.lineno)


def _set_to_literals(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """Names of variables, each with the line in which it is given a literal."""
    for node in nodes:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs: list[tuple[ast.expr, ast.expr | None]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = [*zip(target.elts, node.value.elts, strict=True)]
            yield from (
                (name.id, node.lineno) for name, value in pairs if isinstance(name, ast.Name) and _is_literal(value)
            )


def test_no_compiled_function_gets_a_literal(repository: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (repository / "magis").rglob("*.py")]
    texts = [text for text in texts if COMPILED in text]
    assert len(texts) > 5
    assert [line for text in texts for line in literals(text)] == []


@pytest.mark.parametrize("line",
    [
        "f(1)", "f(-1)", "f(x=True)", "a = 0; f(a)", "a = -1; f(a)", "a: int = 0; f(a)", "a, b = 0, g; f(a)",
        "a = b = 0; a += 1; f(b)",
    ],
)  # fmt: skip
def test_literals_are_found(line: str) -> None:
    head = "@numba.njit(cache=True)\ndef "
    assert len(list(literals(f"{head}f(x): pass\n{head}g(): {line}"))) == 1
    fine = ("a = int(np.int64(0))", "a = 0", "a += 1", "f(a)", "h(1)")
    assert not list(literals(f"{head}f(x): pass\n{head}g():\n" + "\n".join(f"    {each}" for each in fine)))
