"""The layers of docs/architecture.md, as a checker of the syntax trees of both packages.

Every import counts: at module level, inside functions, under TYPE_CHECKING (a type that needs the layer above
is in the wrong layer, and a cycle of annotations is a cycle to the reader), `import_module` of a literal, and every
text that names a factory in one of the packages ("magis.planner.x:make").
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Top to bottom: a module imports only from rows below its own, or from its own package.
LAYERS = (
    ("pytest_magis",),
    ("magis.__main__",),
    ("magis.predict", "magis.testing"),
    ("magis.extensions",),
    ("magis.cli",),
    ("magis.api",),
    ("magis.frontends",),
    ("magis.cases",),
    ("magis.planner",),
    ("magis.strategies",),
    ("magis.models", "magis.report"),
    ("magis.search",),
    ("magis.capture", "magis.runtime"),
    ("magis.fission", "magis.rewrite"),
    ("magis.simulate",),
    ("magis.cost",),
    ("magis.ops",),
    ("magis.graph",),
    ("magis.results",),
    ("magis.module_bytes", "magis.step_records"),
    ("magis.version_run",),
    ("magis.phases",),
    (
        "magis.atomic_files",
        "magis.child_process",
        "magis.current_gate",
        "magis.dtypes",
        "magis.plain_records",
        "magis.progress",
        "magis.quiet",
        "magis.units",
    ),
    ("magis.registry",),
    ("magis.errors",),
    ("magis.printable",),
)
FACADE = "magis"  # loads its exports on first use: bound by no layer, and its table makes no cycle
PACKAGES = ("magis", "pytest_magis")
REGISTRY = "magis.registry"  # the one module of the core that names neighbours
# Neighbour -> its packages, and the other neighbours that it may import.
NEIGHBOURS: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "compile": (("magis.extensions.compile",), frozenset()),
    "models": (("magis.extensions.models", "magis.testing"), frozenset()),
    "onnx": (("magis.extensions.onnx",), frozenset()),
    "outputs": (("pytest_magis.outputs",), frozenset()),
    "paper": (("magis.extensions.paper",), frozenset()),
    "ranks": (("magis.extensions.ranks", "magis.predict"), frozenset()),
    "snapshots": (("magis.extensions.snapshots",), frozenset()),
    "versions": (("magis.extensions.versions", "pytest_magis.against"), frozenset()),
    "why": (("magis.extensions.why",), frozenset()),
}
# What the plugin may use: these modules, and of each only the names in its `__all__`.
PUBLIC = frozenset(
    {
        "magis",
        "magis.api",
        "magis.child_process",
        "magis.current_gate",
        "magis.dtypes",
        "magis.errors",
        "magis.models",
        "magis.models.model_specs",
        "magis.models.step_parts",
        "magis.printable",
        "magis.progress",
        "magis.quiet",
    }
    | {
        "magis.plain_records",
        "magis.registry",
        "magis.report",
        "magis.results",
        "magis.strategies.strategy_names",
    }
    | {"magis.units", "magis.extensions.versions", "magis.version_run"}
)
HARNESS = frozenset({"pytest", "_pytest", "pluggy", "pytest_benchmark", "xdist"})  # never imported by magis
MOST_LINES = 420
FACTORY = re.compile(r"(?P<module>(?:magis|pytest_magis)(?:\.\w+)*):[A-Za-z_]\w*")


@dataclass(frozen=True)
class Import:
    """One imported module (`name` None) or one name of a module, at a line."""

    target: str
    name: str | None
    line: int


@dataclass(frozen=True)
class Module:
    """A source file of one of the two packages."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @cached_property
    def exports(self) -> frozenset[str] | None:
        """The names in its `__all__`; None without one that is a literal list."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
                try:
                    return frozenset(ast.literal_eval(node.value))
                except ValueError:
                    return None
        return None

    def at(self, line: int, text: str) -> str:
        return f"{self.name}:{line}: {text}"


Tree = Mapping[str, Module]


def load(root: Path) -> dict[str, Module]:
    """Every module of both packages under `root`, by dotted name."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            modules[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return modules


def imports(module: Module, tree: Tree) -> Iterator[Import]:
    """Each import of `module`, `from package import submodule` resolved to the submodule."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node.level, node.module or "")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (Import(inner, None, node.lineno) if inner in tree else Import(base, alias.name, node.lineno))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    level = len(name) - len(name.lstrip("."))
                    yield Import(absolute(module, level, name.lstrip(".")), None, node.lineno)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and (named := FACTORY.fullmatch(node.value))
        ):
            yield Import(named["module"], None, node.lineno)


def absolute(module: Module, level: int, name: str) -> str:
    """The absolute name of what `module` imports with `level` leading dots."""
    if level == 0:
        return name
    parts = module.package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])


def row(name: str) -> tuple[int, str] | None:
    """The index of the layer of a module, counted from the top, and its entry there; None without one."""
    for index, entries in enumerate(LAYERS):
        for entry in entries:
            if name == entry or name.startswith(entry + "."):
                return index, entry
    return None


def check_layers(tree: Tree) -> Iterator[str]:
    """Every module has a layer and imports only from below or from its own package."""
    for module in tree.values():
        if module.name in (FACADE, REGISTRY):
            continue
        own = row(module.name)
        if own is None:
            yield module.at(1, "has no layer: give it one in LAYERS or move it into a package that has one")
            continue
        for item in imports(module, tree):
            if item.target.split(".")[0] not in PACKAGES:
                continue
            if item.target == FACADE:
                if own[1] != "pytest_magis" and item.name != "__version__":
                    yield module.at(item.line, "imports the facade: import the module that defines the name")
                continue
            other = row(item.target)
            if other is None or (other[1] != own[1] and other[0] <= own[0]):
                yield module.at(item.line, f"imports {item.target}, which is not in a layer below {own[1]}")


def neighbour(name: str) -> str | None:
    """The neighbour that a module is part of; None for one of the core."""
    found = (
        each for each, (entries, _) in NEIGHBOURS.items() for entry in entries if f"{name}.".startswith(f"{entry}.")
    )
    return next(found, None)


def check_neighbours(tree: Tree) -> Iterator[str]:
    """The core imports no neighbour, a neighbour no other one but those that the table names."""
    for module in tree.values():
        if module.name in (FACADE, REGISTRY):
            continue
        own = neighbour(module.name)
        allowed = {own, None} | (NEIGHBOURS[own][1] if own else set())
        for item in imports(module, tree):
            other = neighbour(item.target)
            if other not in allowed:
                yield module.at(item.line, f"imports {item.target} of the neighbour {other}: ask {REGISTRY} for it")


def check_cycles(tree: Tree) -> Iterator[str]:
    """No module reaches itself through imports."""
    edges = {
        module.name: {item.target for item in imports(module, tree) if item.target in tree and item.target != FACADE}
        for module in tree.values()
        if module.name not in (FACADE, REGISTRY)
    }
    for name in sorted(name for name, targets in edges.items() if name in targets):
        yield f"{name}:1: imports itself"
    try:
        graphlib.TopologicalSorter({name: targets - {name} for name, targets in edges.items()}).prepare()
    except graphlib.CycleError as error:
        yield f"{error.args[1][0]}:1: import cycle: {' <- '.join(error.args[1])}"


def check_public(tree: Tree) -> Iterator[str]:
    """The plugin uses only what public modules of magis list in `__all__`, by import or by attribute."""
    for name in sorted(PUBLIC & tree.keys()):
        if tree[name].exports is None:
            yield tree[name].at(1, "is public but has no literal `__all__`")
    for module in tree.values():
        if not module.name.startswith("pytest_magis"):
            continue
        for item in imports(module, tree):
            if item.target.split(".")[0] == "magis":
                yield from refuse(module, item.target, item.name, item.line, tree)
        bound = bindings(module, tree)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                first, _, rest = ast.unparse(node).partition(".")
                full = f"{bound.get(first, '')}.{rest}"
                target, _, name = full.rpartition(".")
                if full.startswith("magis.") and full in tree:
                    yield from refuse(module, full, None, node.lineno, tree)
                elif full.startswith("magis.") and target in tree:
                    yield from refuse(module, target, name, node.lineno, tree)


def bindings(module: Module, tree: Tree) -> dict[str, str]:
    """Local name -> the module that an import of `module` bound to it."""
    bound = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node.level, node.module or "")
            bound |= {a.asname or a.name: f"{base}.{a.name}" for a in node.names if f"{base}.{a.name}" in tree}
    return bound


def refuse(module: Module, target: str, name: str | None, line: int, tree: Tree) -> Iterator[str]:
    """Complain when `target`, or the `name` in it, is not public."""
    if target not in PUBLIC:
        yield module.at(line, f"uses {target}, which is not a public module of magis")
    elif name is not None and target in tree and name not in (tree[target].exports or ()):
        yield module.at(line, f"uses {target}.{name}, which is not in `{target}.__all__`")


def check_statements(tree: Tree) -> Iterator[str]:
    """No star import, no assertion as control flow, no `global` statement, no pytest in magis."""
    for module in tree.values():
        for item in imports(module, tree):
            if item.name == "*":
                yield module.at(item.line, f"star import from {item.target}")
            if module.name.startswith("magis") and item.target.split(".")[0] in HARNESS:
                yield module.at(item.line, f"magis imports {item.target}: only pytest_magis knows pytest")
        for node in ast.walk(module.tree):
            match node:
                case ast.Assert():
                    yield module.at(node.lineno, "assert statement: raise an error of magis.errors")
                case ast.Global():
                    yield module.at(node.lineno, f"global {', '.join(node.names)}: pass the value in")
                case ast.ExceptHandler(type=ast.expr() as caught) if "AssertionError" in ast.unparse(caught):
                    yield module.at(node.lineno, "AssertionError caught: catch the error that is meant")
                case ast.Call() if "suppress(" in (text := ast.unparse(node)) and "AssertionError" in text:
                    yield module.at(node.lineno, "AssertionError suppressed: name the error that is meant")


def check_lengths(root: Path) -> Iterator[str]:
    """No Python file of the repository is over the limit."""
    folders = (*PACKAGES, "tests", "benchmarks", "tools")
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            yield f"{path.relative_to(root)}:{lines}: more than {MOST_LINES} lines: split it"


def check_names(tree: Tree) -> Iterator[str]:
    """One name, one meaning: no two modules of one name, no class defined twice."""
    known: dict[str, str] = {}
    for module in tree.values():
        short = module.path.stem
        names = [] if short in ("__init__", "__main__") else [(f"module {short}", 1)]
        names += [(f"class {node.name}", node.lineno) for node in module.tree.body if isinstance(node, ast.ClassDef)]
        for name, line in names:
            if name in known:
                yield module.at(line, f"{name} is in {known[name]}, too: give it another name")
            known[name] = module.name


def violations(root: Path) -> list[str]:
    """Everything that breaks a rule under `root`, one line each."""
    tree = load(root)
    found = [
        line
        for check in (check_layers, check_neighbours, check_cycles, check_public, check_names, check_statements)
        for line in check(tree)
    ]
    return found + list(check_lengths(root))
