"""Documents: pages made of the code are up to date, examples run, and what a page names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from magis import registry
from tests.layering import NEIGHBOURS, load, neighbour


@pytest.mark.parametrize("tool", ["tools/reference.py", "tools/options_page.py"])
def test_a_page_made_of_code_is_up_to_date(repository: Path, tool: str) -> None:
    command = [sys.executable, tool, "--check"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run {tool} and look at what git says\n{done.stderr}"


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


def test_the_example_of_the_paper_runs(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (repository / "docs" / "paper.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    opened = 'dump_file=open("results.csv", "a")'
    assert opened in block
    with Path("results.csv").open("a") as stream:  # closed again, which the example leaves to Python
        exec(compile(block.replace(opened, "dump_file=stream"), "docs/paper.md", "exec"), {"stream": stream})
    assert (tmp_path / "data" / "name.graph").is_file()
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 2
    capsys.readouterr()


EXECUTED = {
    "docs/checkpoint-policy.md": "tests/compile/test_docs.py",
    "docs/ci.md": "tests/plugin/test_pages.py",
    "docs/compile.md": "tests/compile/test_docs.py",
    "docs/estimate.md": "tests/api/test_estimate.py",
    "docs/extending.md": "tests/test_documents.py",
    "docs/fit.md": "tests/cli/test_fit.py",
    "docs/limits.md": "tests/plugin/test_pages.py",
    "docs/gate-my-model.md": "tests/plugin/test_pages.py",
    "docs/optimize.md": "tests/training/test_docs.py",
    "docs/paper.md": "tests/test_documents.py",
    "docs/peak.md": "tests/plugin/test_peak.py",
    "docs/report.md": "tests/plugin/test_pages.py",
    "docs/strategies.md": "tests/steps_of_strategies/test_plans.py",
    "docs/trainers.md": "tests/plugin/test_trainers.py",
    "docs/why.md": "tests/why/test_why.py",
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


def pages_of(repository: Path) -> list[Path]:
    root = (page for page in repository.glob("*.md") if page.name != "CHANGELOG.md")  # which names what is gone
    return sorted((*root, *repository.glob("docs/**/*.md")))


def test_the_site_lists_every_page_once(repository: Path) -> None:
    """Those of docs/ and of the root, README.md as the first one."""
    nav = (repository / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [path.relative_to(repository / "docs").as_posix() for path in repository.glob("docs/**/*.md")]
    pages += [path.name.lower() if path.name != "README.md" else "index.md" for path in repository.glob("*.md")]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == sorted(pages)


def test_every_page_begins_with_something_to_run(repository: Path) -> None:
    """A block of code before the first heading of a section."""
    without = [
        page.name
        for page in sorted(repository.glob("docs/**/*.md"))
        if not re.search(r"^```", page.read_text(encoding="utf-8").partition("\n## ")[0], re.MULTILINE)
    ]
    assert not without


def test_links_into_pages_lead_to_headings(repository: Path) -> None:
    astray = set()
    for page in pages_of(repository):
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            text = (page.parent / target if target else page).read_text(encoding="utf-8")
            if anchor not in {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}:
                astray.add(f"{page.name}: {target}#{anchor}")
    assert sorted(astray) == []


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


ROOMS = ("magis", "pytest_magis", "benchmarks", "tests", "tools", "docs", ".ci", ".github")
"""What a path that a page names may begin with."""
WRITTEN_BY_RUNS = re.compile(r"[<*{]|\bGPU\b|^docs/results-|^benchmarks/results/progress_")
"""Patterns, and files that only some runs write."""
LIBRARY = {"net.py", "test_memory.py", "test_blocks.py", "conftest.py", "results.csv", "plan.txt"}
LIBRARY |= {"train.py", "test_train.py", "test_own_loss.py"}
"""Files of examples, of the user, and of other projects."""


def named_files(text: str) -> set[str]:
    """Paths and file names in code spans and in commands: `magis/graph/nodes.py`, `text.py`, `benchmarks/paper.py`."""
    words = {word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()}
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        words |= {word for line in block.splitlines() if line.startswith("$") for word in line.split()}
    found = set()
    for word in words:
        path = word.strip("(),.:;'\"").partition("::")[0]
        in_a_room = "/" in path and path.split("/")[0] in ROOMS and not WRITTEN_BY_RUNS.search(path)
        if in_a_room or re.fullmatch(r"(?:[a-z_]+/)?[a-z_]+\.py|[a-z_]+\.(?:md|txt|svg)", path):
            found.add(path)
    return found - LIBRARY


def test_every_file_that_a_page_names_exists(repository: Path) -> None:
    tracked = [path for room in ROOMS for path in (repository / room).rglob("*") if "__pycache__" not in path.parts]
    names = {path.name for path in (*tracked, *repository.iterdir())}
    names |= {f"{path.parent.name}/{path.name}" for path in tracked}
    absent = {
        f"{page.relative_to(repository)}: {name}"
        for page in pages_of(repository)
        for name in named_files(page.read_text(encoding="utf-8"))
        if name not in names and not ("/" in name and (repository / name).exists())
    }
    assert sorted(absent) == []


def test_a_page_tells_of_every_module(repository: Path) -> None:
    """Of the core `where_is_what.md`, of a neighbour its own page."""
    untold = []
    for module in load(repository).values():
        owner = neighbour(module.name)
        page = repository / "docs" / (f"neighbours/{owner}.md" if owner else "where_is_what.md")
        names = set(re.findall(r"\w+\.py\b", page.read_text(encoding="utf-8")))
        if module.path.name not in ("__init__.py", *names):
            untold.append(f"{page.name}: {module.path.relative_to(repository)}")
    assert untold == []


def test_every_neighbour_has_a_page_that_names_its_rows(repository: Path) -> None:
    folder = repository / "docs" / "neighbours"
    assert {page.stem for page in folder.iterdir()} == NEIGHBOURS.keys()
    places = [(kind, name, place) for kind, rows in registry._PLACES.items() for name, place in rows.items()]
    for kind, _, place in places:
        owner = neighbour(place.partition(":")[0])
        assert f"`{kind}`" in (folder / f"{owner}.md").read_text(encoding="utf-8"), place
    assert max(len(page.read_text(encoding="utf-8").splitlines()) for page in folder.iterdir()) <= 40
    assert len((repository / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_every_page_that_the_code_names_exists(repository: Path) -> None:
    absent = {
        f"{path.relative_to(repository)}: {page}"
        for room in ("magis", "pytest_magis", "benchmarks", "tools", "tests")
        for path in (repository / room).rglob("*.py")
        for page in re.findall(r"docs/[a-z/-]+\.(?:md|svg)", path.read_text(encoding="utf-8"))
        if not (repository / page).is_file()
    }
    assert sorted(absent) == []


def test_every_module_and_name_that_a_page_names_exists(repository: Path) -> None:
    """`magis.cost.shapes`, `magis.strategies.RankStrategy`: a module, or a name in one."""
    absent = set()
    for page in pages_of(repository):
        for dotted in re.findall(r"`((?:magis|pytest_magis)(?:\.\w+)+)", page.read_text(encoding="utf-8")):
            if not dotted.startswith(BY_NAME_ALONE) and not is_there(repository, dotted):
                absent.add(f"{page.relative_to(repository)}: {dotted}")
    assert sorted(absent) == []


BY_NAME_ALONE = (
    "magis.loop", "magis.part", "magis.join", "magis.reduce", "magis.add", "magis.turn", "magis.check",  # and operators
    "magis.original_", "magis.optimized_", "magis.memory_ratio", "magis.latency_ratio", "magis.verdict",  # of JUnit
)  # fmt: skip


def is_there(repository: Path, dotted: str) -> bool:
    path = repository / dotted.replace(".", "/")
    module, _, name = dotted.rpartition(".")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    return is_there(repository, module) and hasattr(import_module(module), name)
