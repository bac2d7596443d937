"""What a stranger meets first says the same everywhere: metadata, pins, facade, make targets, documents."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import magis
from magis import registry
from tests.layering import LAYERS, NEIGHBOURS
from tests.sampled import LEFT_TO_SOAK, SAMPLED, left_to_soak

OPTION = re.compile(r"--magis-[a-z-]+")


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pins(repository: Path) -> dict[str, Requirement]:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def make(repository: Path, *arguments: str) -> str:
    done = run_make(repository, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As from a shell, even when these tests run under `make test` themselves."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def targets(repository: Path) -> set[str]:
    return set(re.findall(r"^make (\S+)", make(repository, "help"), re.MULTILINE))


# --- versions and dependencies ------------------------------------------------------------------------------


def test_every_pin_is_exact_and_public(pins: dict[str, Requirement]) -> None:
    assert len(pins) > 20
    for requirement in pins.values():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(requirement.specifier)), requirement


def test_every_declared_dependency_is_pinned_within_its_bounds(
    project: dict[str, Any], pins: dict[str, Requirement]
) -> None:
    declared = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    for requirement in map(Requirement, declared):
        if requirement.name == project["name"]:
            continue
        (pin,) = pins[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version), requirement


def test_what_is_pinned_is_what_runs(pins: dict[str, Requirement]) -> None:
    runs = {canonicalize_name(found.name): found.version for found in metadata.distributions()}
    common = pins.keys() & runs.keys()
    assert common >= {"torch", "pytest", "numpy", "numba"}
    assert {name: runs[name] for name in common if not pins[name].specifier.contains(runs[name])} == {}


def test_nothing_installed_for_this_project_is_unpinned(pins: dict[str, Requirement]) -> None:
    seen: set[tuple[str, str]] = set()
    todo = [("pytest-magis", ""), ("pytest-magis", "dev"), ("pytest-magis", "test")]  # name, extra
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(requirement.name), more) for more in ("", *requirement.extras)]
    assert {name for name, _ in seen} - {"pytest-magis"} <= pins.keys()


def test_the_installed_version_is_the_one_in_the_package(project: dict[str, Any]) -> None:
    assert project["dynamic"] == ["version", "readme"]
    assert metadata.version(project["name"]) == magis.__version__


def test_links_of_the_readme_are_addresses_of_files_on_the_package_index(
    repository: Path, project: dict[str, Any], readme: str
) -> None:
    address = project["urls"]["Repository"]
    text = runpy.run_path(str(repository / "setup.py"))["absolute"](readme, address)
    links = re.findall(r"\]\(([^)#]+)", text)
    ours = [link.removeprefix(f"{address}/") for link in links if link.startswith(f"{address}/")]
    assert [link for link in links if not link.startswith("https://")] == []
    assert [link for link in ours if not (repository / link.split("/", 2)[2]).is_file()] == []
    assert {link.split("/HEAD/")[0] for link in ours if link.endswith(".svg")} == {"raw"}
    assert {link.split("/HEAD/")[0] for link in ours if link.endswith(".md")} == {"blob"}


@pytest.mark.parametrize("package", ["magis", "pytest_magis"])
def test_the_wheel_holds_a_package_whole(repository: Path, package: str) -> None:
    """`setup.py` finds folders that have an `__init__.py`; other files are named in pyproject.toml."""
    settings = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    files = [path for path in (repository / package).rglob("*.*") if "__pycache__" not in path.parts]
    others = {path for path in files if path.suffix != ".py"}
    assert others == {path for kind in settings["package-data"][package] for path in (repository / package).glob(kind)}
    assert [path for path in files if not (path.parent / "__init__.py").is_file() and path not in others] == []
    assert settings["packages"]["find"]["include"] == ["magis", "magis.*", "pytest_magis", "pytest_magis.*"]


def test_the_entry_point_is_the_plugin(project: dict[str, Any]) -> None:
    (entry,) = [e for e in metadata.distribution(project["name"]).entry_points if e.group == "pytest11"]
    assert (entry.name, entry.value) == ("magis", "pytest_magis.plugin")
    assert entry.load().__name__ == "pytest_magis.plugin"


# --- the facade ---------------------------------------------------------------------------------------------


def exports() -> dict[str, str]:
    """Public name -> the module that defines it, those of neighbours included."""
    places = registry._PLACES["export"]
    return magis._EXPORTS | {name: place.partition(":")[0] for name, place in places.items()}


@pytest.mark.parametrize("name", magis.__all__)
def test_every_public_name_loads(name: str) -> None:
    value = getattr(magis, name)
    if name != "__version__":
        module = importlib.import_module(exports()[name])
        assert value is getattr(module, name)
        assert name in module.__all__
    assert name in dir(magis)


def test_the_facade_says_the_same_three_times(repository: Path) -> None:
    tree = ast.parse((repository / "magis" / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        (alias.asname or alias.name): node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == exports()
    assert {*typed, "__version__"} == set(magis.__all__)


@pytest.mark.parametrize("name", magis._MOVED)
def test_a_name_that_moved_works_with_one_line(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"magis.{name} is magis") as found:
        assert getattr(magis, name) is getattr(importlib.import_module(magis._MOVED[name]), name)
    assert [each.filename for each in found] == [__file__]
    assert name not in dir(magis)


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'optimise'; public names: .*MagisError"):
        magis.optimise  # noqa: B018  (the lookup is the test)


# --- make and CI --------------------------------------------------------------------------------------------


def test_make_alone_prints_the_help(repository: Path) -> None:
    assert make(repository) == make(repository, "help")
    assert targets(repository) >= {"gate", "test", "soak", "bench", "coverage", "mutants", "clean", "venv"}


@pytest.mark.parametrize("target", ["gate", "test"])
def test_a_target_prepares_a_fresh_clone_first(repository: Path, tmp_path: Path, target: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((repository / name).read_bytes())
    plan = make(tmp_path, "--dry-run", target).splitlines()
    steps = [index for index, line in enumerate(plan) if " -m venv " in line or "pip install" in line]
    pytests = [index for index, line in enumerate(plan) if "/bin/pytest" in line]
    assert len(steps) == 3
    assert max(steps) < min(pytests)
    assert all("--constraint constraints.txt" in line for line in plan if "pip install" in line)


def test_an_old_interpreter_is_refused_in_one_line(repository: Path, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((repository / name).read_bytes())
    old = tmp_path / "old-python"
    old.write_text(
        # runs `-c program` like an interpreter, except that the program sees another version of `sys`
        f"#!{sys.executable}\nimport sys, types\n"
        "old = types.SimpleNamespace(version_info=(3, 10), version='3.10.1 x', exit=sys.exit)\n"
        "exec(sys.argv[2], {'__builtins__': {'__import__': lambda name, *rest: old}})\n"
    )
    old.chmod(0o755)
    done = run_make(tmp_path, "venv", f"PYTHON={old}")
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed, this is 3.10.1: make PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_the_two_commands_of_the_readmes_first_screen(repository: Path, readme: str) -> None:
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    assert commands[0] == "set -euo pipefail"
    assert commands[-2:] == ["make gate", "make test"]
    assert re.findall(r"^\$ (make \w+)", "\n".join(readme.splitlines()[:20]), re.MULTILINE) == commands[-2:]


# --- documents ----------------------------------------------------------------------------------------------


def test_the_page_of_options_lists_those_that_pytest_lists(
    repository: Path, fresh_python: Callable[[str], str]
) -> None:
    text = fresh_python("import pytest, sys; sys.exit(pytest.main(['--help']))")
    page = (repository / "docs" / "options.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(--magis-[a-z-]+)`", page, re.MULTILINE)
    assert sorted(rows) == sorted(set(OPTION.findall(text)))


def test_the_page_for_developers_lists_every_make_target(repository: Path) -> None:
    page = (repository / "docs" / "development.md").read_text(encoding="utf-8")
    table = "\n".join(re.findall(r"^\| `make .*", page, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)`", table)) == targets(repository) - {"help"}


def test_the_readme_is_short(readme: str) -> None:
    assert len(readme.splitlines()) <= 120


def test_the_documented_layers_are_the_enforced_ones(repository: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| layer | holds |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert [tuple(re.findall(r"`([a-z_.]+)`", row)) for row in rows] == list(LAYERS)


def test_the_documented_neighbours_are_the_enforced_ones(repository: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| neighbour | is | may import |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    rows = [[re.sub(r"\[(\w+)\]\(neighbours/\1\.md\)", r"\1", cells[0]), *cells[1:]] for cells in rows]
    assert {name: tuple(re.findall(r"`([a-z_.]+)`", entries)) for name, entries, _ in rows} == {
        name: entries for name, (entries, _) in NEIGHBOURS.items()
    }
    others = {name: ", ".join(["the core", *sorted(allowed)]) for name, (_, allowed) in NEIGHBOURS.items()}
    assert {name: allowed for name, _, allowed in rows} == others


def test_benchmarks_run_from_a_checkout_and_tell_how(repository: Path) -> None:
    """What is beside a program is `lib` to it: the package `benchmarks` is on its path only where somebody puts it."""
    for path in repository.glob("benchmarks/*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^(?:from|import) benchmarks\b", text, re.MULTILINE), path
        assert "arguments(" in text or "census_lib" in text, path


def test_the_changelog_has_a_place_for_what_comes_next(repository: Path) -> None:
    headings = re.findall(r"^## (.+)$", (repository / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", release) for release in headings[1:])


def test_the_root_conftest_only_switches_on_pytester(repository: Path) -> None:
    tree = ast.parse((repository / "conftest.py").read_text(encoding="utf-8"))
    assert [ast.unparse(node) for node in tree.body[1:]] == ["pytest_plugins = ['pytester']"]


def test_what_runs_leave_behind_is_ignored_and_baselines_are_not(repository: Path) -> None:
    paths = ["results.csv", "data/x.txt", ".venv/x", "baselines/cpu/bert.json"]
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *paths],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 128:
        pytest.skip("not a git working tree")
    assert done.stdout.split() == paths[:3]


def test_what_is_left_to_soak_exists(repository: Path) -> None:
    """A test that was renamed would be back in the default run, unnoticed."""
    for pattern in (*LEFT_TO_SOAK, *SAMPLED):
        file, _, name = pattern.partition("::")
        function = name.partition("[")[0].replace("*", r"\w*")
        text = (repository / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", text, re.MULTILINE), pattern
    networks = "tests/rewrite/test_networks.py::test_random_plans"
    assert left_to_soak((f"{networks}[unet-0-0]@group", f"{networks}[vit-0-0]")) == {f"{networks}[unet-0-0]@group"}
    programs = [f"tests/fuzz/test_random.py::test_a_program[{seed}]" for seed in range(40)]
    left = left_to_soak(programs)
    assert len(left) == 37
    assert left_to_soak(reversed(programs)) == left


def test_no_document_is_referred_to_that_is_not_here(repository: Path) -> None:
    """Nor by its name in capitals ("DESIGN section 3"), nor by a link from one page to another."""
    absent = re.compile(r"\b(?:SPEC|DESIGN|PAPER|PLANNER|HOUSE|STYLE)(?:'s| section|\)|, |:)")
    pages = [*repository.glob("*.md"), *repository.glob("docs/**/*.md")]
    sources = [path for room in ("magis", "pytest_magis", "benchmarks") for path in repository.glob(f"{room}/**/*.py")]
    for path in (*pages, *sources):
        assert not absent.findall(path.read_text(encoding="utf-8")), path
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page}: {link}"
