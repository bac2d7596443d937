"""Pages that show commands: README.md, docs/gate-my-model.md, ci.md and report.md, followed to the letter."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from magis.cli.main import main
from pytest_magis.flags import MARK_ARGUMENTS
from pytest_magis.option_values import BUDGETS, CACHES

PYTEST = re.compile(r"^\$ (pytest .*)$", re.MULTILINE)
"""A command that a page shows."""


def test_the_guide_works(gate, repository):
    gate.use_real_core()
    text = (repository / "docs" / "gate-my-model.md").read_text(encoding="utf-8")
    files = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["test_memory.py", "test_own_loss.py", "test_blocks.py", "conftest.py"]
    for name, content in files:
        (gate.root / name).write_text(content, encoding="utf-8")
    gate().assert_outcomes(failed=4)
    gate("--magis-update=new").assert_outcomes(passed=4)
    assert (gate.root / "baselines" / "cpu" / "test_memory.test_classifier.json").is_file()
    # timings of a busy machine are not what this test is about
    gate("--magis-latency-tolerance=9").assert_outcomes(passed=4)
    assert "no package 'my_package'" in gate.refuses("--magis-models=classifier")


def test_the_example_of_limits_works(gate, repository):
    gate.use_real_core()
    text = (repository / "docs" / "limits.md").read_text(encoding="utf-8")
    ((name, content),) = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (gate.root / name).write_text(content, encoding="utf-8")
    gate.accept(name)
    result = gate(name)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*magis * reserved 0.8 * pass"])


def test_it_names_all_that_a_mark_takes(repository):
    text = (repository / "docs" / "gate-my-model.md").read_text(encoding="utf-8")
    for name in MARK_ARGUMENTS:
        assert f"`{name}`" in text


def test_the_readmes_walk_ends_green(gate, repository):
    """Its test is gated as it stands; with the change that it suggests the gate is red, in the lines that it shows; the
    command that it shows accepts all of it."""
    gate.use_real_core()
    text = (repository / "README.md").read_text(encoding="utf-8")
    ((name, program),) = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    change = "Block(64, 384)"
    assert text.count(f"`{change}`") == 1
    walk = text.partition("## How far")[0].split(f"`{change}`")
    first, then = ([shlex.split(line, comments=True)[1:] for line in PYTEST.findall(part)] for part in walk)
    assert len(first) == len(then) == 2

    def ends(arguments, **outcome):  # timings of a busy machine are not what this test is about
        result = gate(*arguments, "--magis-latency-tolerance=9")
        result.assert_outcomes(**outcome)
        return result

    (gate.root / name).write_text(f"# {name}\n{program}", encoding="utf-8")
    for arguments in first:
        ends(arguments, passed=2)
    wider = program.replace("Block(64, 256)", change, 1)
    (gate.root / name).write_text(f"# {name}\n{wider}", encoding="utf-8")
    result = ends(first[-1], failed=2)
    (shown,) = re.findall(r"^```\n(_+ test_my_model\[eager\].*?)^```$", text, re.MULTILINE | re.DOTALL)
    *lines, accept = shown.replace(" --magis-update", " --magis-latency-tolerance=9 --magis-update").splitlines()
    printed = {line.strip("_ ") for line in result.outlines}  # a heading is as wide as the terminal
    assert [line for line in (*lines, accept) if line.strip("_ ") not in printed] == []
    assert len(lines) == 5
    assert shown.splitlines()[-1].endswith(f": pytest {shlex.join(then[0])}")
    for arguments in then:
        ends(arguments, passed=2)


# docs/ci.md, on the made-up core


@pytest.fixture
def ci(repository):
    return (repository / "docs" / "ci.md").read_text(encoding="utf-8")


def test_the_shares_and_their_merge(gate, ci, monkeypatch):
    gate.accept("--magis-models=all", "--magis-device=sim:rtx3090")
    (gate.root / "baselines" / "sim-rtx3090").rename(gate.root / "baselines" / "sim-h200")
    for path in (gate.root / "baselines" / "sim-h200").iterdir():
        path.write_text(path.read_text().replace("sim:rtx3090", "sim:h200"))
    gate.extend_conftest('\nDEVICES = ("cpu", "sim:h200")\n')
    commands = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", ci, re.MULTILINE)]
    assert [words[0] for words in commands] == ["pytest", "pytest", "pytest", "magis"]
    counts = []
    for _, *arguments in commands[:3]:
        assert gate(*arguments).ret == 0
        counts.append(len(gate.rows(arguments[-1].partition("=")[2])))
    monkeypatch.chdir(gate.root)
    assert main(commands[3][1:]) == 0
    assert len(gate.rows("results.csv")) == sum(counts) == 21


def test_the_workflow_asks_for_what_there_is(gate, ci):
    text = ci.partition("```yaml\n")[2].partition("\n```")[0]
    shards = re.search(r"shard: \[(.*)\]", text)
    assert shards is not None
    gate.extend_conftest('\nDEVICES = ("cpu", "sim:h200")\n')
    found = set()
    for shard in shards[1].split(", "):
        command = re.search(r"run: python -m pytest (.*)", text.replace("${{ matrix.shard }}", shard))
        assert command is not None
        arguments = [word for word in shlex.split(command[1]) if word not in ("-n", "auto")]
        result = gate(*arguments, "--collect-only", "-q")
        ids = {line for line in result.outlines if line.startswith("magis::")}
        assert not found & ids
        found |= ids
    assert len(found) == 21
    assert "path: .pytest_cache" in text


def test_the_tables_of_ci_name_what_the_options_take(ci):
    assert re.findall(r"^\| `(\w+)`", ci.partition("## Budgets")[0], re.MULTILINE) == list(CACHES)
    budgets = ci.partition("## Budgets")[2].partition("## Many")[0]
    assert re.findall(r"^\| `(\w+)`", budgets, re.MULTILINE) == list(BUDGETS)
    for number in (number for number in BUDGETS.values() if number is not None):
        assert f"{number:,}" in budgets


# docs/report.md: one command after another

CHANGE = "`make(inner=2048)`"


def test_the_examples_of_the_report_run(gate, repository: Path) -> None:
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
        [sys.executable, "-c", reading], cwd=gate.root, capture_output=True, text=True, timeout=300, check=True
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
            cwd=gate.root, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        printed = done.stdout
    lines = [line.rstrip().replace(f"{gate.root}/", "") for line in printed.splitlines()]
    assert expected
    assert [line for line in expected if line not in lines] == [], printed
