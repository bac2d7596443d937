"""The commands of docs/ci.md run as they stand, on the made-up core."""

from __future__ import annotations

import re
import shlex

import pytest

from magis.cli.main import main
from pytest_magis.options import BUDGETS, CACHES


@pytest.fixture
def page(repository):
    return (repository / "docs" / "ci.md").read_text(encoding="utf-8")


def test_the_shares_and_their_merge(gate, page, monkeypatch):
    gate.accept("--magis-models=all", "--magis-device=sim:rtx3090")
    (gate.root / "baselines" / "sim-rtx3090").rename(gate.root / "baselines" / "sim-h200")
    for path in (gate.root / "baselines" / "sim-h200").iterdir():
        path.write_text(path.read_text().replace("sim:rtx3090", "sim:h200"))
    gate.extend_conftest('\nDEVICES = ("cpu", "sim:h200")\n')
    commands = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", page, re.MULTILINE)]
    assert [words[0] for words in commands] == ["pytest", "pytest", "pytest", "magis"]
    counts = []
    for _, *arguments in commands[:3]:
        assert gate(*arguments).ret == 0
        counts.append(len(gate.rows(arguments[-1].partition("=")[2])))
    monkeypatch.chdir(gate.root)
    assert main(commands[3][1:]) == 0
    assert len(gate.rows("results.csv")) == sum(counts) == 21


def test_the_workflow_asks_for_what_there_is(gate, page):
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
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


def test_the_tables_name_what_the_options_take(page):
    assert re.findall(r"^\| `(\w+)`", page.partition("## Budgets")[0], re.MULTILINE) == list(CACHES)
    budgets = page.partition("## Budgets")[2].partition("## Many")[0]
    assert re.findall(r"^\| `(\w+)`", budgets, re.MULTILINE) == list(BUDGETS)
    for number in (number for number in BUDGETS.values() if number is not None):
        assert f"{number:,}" in budgets
