"""`magis bisect`: the search against a plain one, and the command on a repository with a planted commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.cli.main import main
from magis.extensions.versions.bisection import first_bad, growths
from tests.plugin.wheels import NETWORK as DEPENDENT
from tests.plugin.wheels import git, offer

ARGS = ("--", "-p", "pytest_magis.plugin", "test_memory.py")
# the made-up core reads figures from fake.json, which is part of each revision
MADE_UP = "import pytest\n@pytest.mark.magis(memory_ratios=[0.8])\ndef test_net(): ...\n"
REAL = """
import pytest, torch
from torch import nn

@pytest.mark.magis(strategies=["eager"], device="sim:h100")
def test_net():
    inner = 64
    module = nn.Sequential(nn.Linear(32, inner), nn.ReLU(), nn.Linear(inner, 8))
    return module, (torch.randn(256, 32), torch.randn(256, 8)), nn.functional.mse_loss
"""


@given(st.data())
def test_the_first_bad_one_is_found_in_the_fewest_looks(data):
    count = data.draw(st.integers(1, 70))
    first = data.draw(st.integers(1, count))  # `count`: none of them
    broken = data.draw(st.sets(st.integers(1, max(1, count - 1)), max_size=data.draw(st.sampled_from([0, 0, 5]))))
    asked = []

    def is_bad(index):
        assert 1 <= index < count
        assert index not in asked
        asked.append(index)
        return None if index in broken else index >= first

    suspects = first_bad(count, is_bad)
    sound = [index for index in range(first, count) if index not in broken]
    if not sound:
        assert suspects == []
        return
    assert suspects[-1] == sound[0]
    assert first in suspects
    assert set(suspects[:-1]) <= broken
    if not broken:
        assert len(asked) <= (count - 1).bit_length()


def test_growth_is_judged_case_by_case():
    before, after = {"a": 100, "b": 100, "gone": 5}, {"a": 101, "b": 103, "new": 7}
    assert [str(each) for each in growths(before, after, 0.02)] == ["b: 100 B -> 103 B, +3.0%"]
    assert [each.case for each in growths(before, after, 0.0)] == ["a", "b"]


@pytest.fixture
def history(gate):
    """A repository of eight commits: the sixth makes the network larger, and the third cannot be run."""
    return written(gate, MADE_UP, 8, planted=6, broken=3)


def written(gate, text, commits, planted, broken=None, ini="[pytest]\naddopts = -p no:cacheprovider\n"):
    if text == REAL:
        gate.use_real_core()
    gate.pytester.makeini(ini)
    git(gate.root, "init", "--quiet", "--initial-branch=main")
    (gate.root / ".gitignore").write_text("calls.txt\n__pycache__/\n")
    for number in range(1, commits + 1):
        factor = 1.0 if number < planted else 1.1
        gate.fake(any_case={"ori_tensor": factor, "ori_peak": factor, "opt_tensor": factor, "opt_peak": factor})
        inner = text.replace("inner = 64", f"inner = {64 if number < planted else 96}")
        wrong = "raise ValueError(1)" if number == broken else ""
        (gate.root / "test_memory.py").write_text(f"# {number}\n{wrong}\n{inner}")
        git(gate.root, "add", ".")
        git(gate.root, "commit", "--quiet", f"--message=commit {number}")
        git(gate.root, "tag", f"c{number}")
    return gate.root


@pytest.mark.parametrize(
    ("text", "commits", "planted", "looks"), [(MADE_UP, 8, 6, 4), pytest.param(REAL, 64, 41, 7, marks=pytest.mark.soak)]
)
def test_a_planted_commit_is_named_and_the_working_tree_stays(gate, capsys, text, commits, planted, looks):
    root = written(gate, text, commits, planted)
    (root / "test_memory.py").write_text("what is being edited stays")
    assert main(["bisect", "c1", "main", *ARGS]) == 0
    out, err = capsys.readouterr()
    first, second, *_ = out.splitlines()
    assert first.startswith("memory grew at ")
    assert first.endswith(f"somebody: commit {planted} ({looks} measurements)")
    assert second.startswith("  test_memory.test_net[eager]: ")
    assert err.count("measuring") == looks
    assert (root / "test_memory.py").read_text() == "what is being edited stays"
    listed = subprocess.run(["git", "worktree", "list"], cwd=root, capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1


def test_what_cannot_be_measured_is_left_out_and_nothing_grew_is_said(history, capsys):
    assert main(["bisect", "c1", "c5", "--case", "test_memory.test_net[eager]", *ARGS]) == 1
    out, err = capsys.readouterr()
    assert out == "nothing grew between c1 and c5 (5 measurements)\n"
    assert "  left out: the run of " in err


def test_cases_have_the_names_of_a_run_and_of_its_results(history, capsys):
    for name in ("test_memory.test_net[magis-mem0.8]", "test_memory.test_net[magis mem 0.8]"):
        assert main(["bisect", "c5", "main", "--case", name, *ARGS]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert "commit 6" in first
        assert second.startswith("  test_memory.test_net[magis mem 0.8]: ")


@pytest.mark.soak
def test_the_release_at_which_a_case_grew_is_named(gate, tmp_path_factory, monkeypatch, capsys):
    gate.use_real_core()
    offer(tmp_path_factory.mktemp("wheels"), monkeypatch, v1_0=64, v1_1=64, v2_0=96, v2_1rc1=96, v2_1=96)
    (gate.root / "test_memory.py").write_text(DEPENDENT)
    assert main(["bisect", "net-width==1.0", "net-width==2.1", *ARGS]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("memory grew at net-width==2.0 (3 measurements)\n  test_memory.test_net[eager]: ")
    assert err.count("installing") == 3
    assert main(["bisect", "net-width==2.1", "net-width==1.1", *ARGS]) == 1
    out, err = capsys.readouterr()
    assert out == "nothing grew between net-width==2.1 and net-width==1.1 (3 measurements)\n"
    assert err.count("installing") == 1  # those of before are kept


INTERRUPTED = """
import signal, sys
from pathlib import Path
from magis import child_process

CHILD = '''
import signal, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    Path("started").touch()
    time.sleep(100)
except KeyboardInterrupt:
    Path("cleaned").touch()
'''
child_process.PATIENCE = 3
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    child_process.run_captured([sys.executable, "-c", CHILD])
except KeyboardInterrupt:
    sys.exit(0 if Path("cleaned").exists() else 3)
"""


def test_a_command_cleans_up_where_the_interrupt_was_sent_to_its_caller_alone(tmp_path, repository):
    variables = os.environ | {"PYTHONPATH": str(repository)}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=tmp_path, env=variables) as process:
        while process.poll() is None and not (tmp_path / "started").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0


# What runs on versions leave, and what they are given. The made-up core reads figures from fake.json

SAYS_ITS_PROFILES = """
from pathlib import Path
from pytest_magis.options import anywhere

def pytest_sessionfinish(session):
    with Path({!r}).open("a") as stream:
        stream.write(f"{{anywhere(session.config).profiles}}\\n")
"""
INI = "[pytest]\naddopts = -p no:cacheprovider\nmagis_baselines = stored\nmagis_report = all.html\n"


@pytest.mark.parametrize(
    ("first", "last", "code"), [("c1", "c3", 0), ("net-width==1.0", "net-width==2.0", 1)], ids=["revisions", "releases"]
)
def test_runs_on_versions_leave_nothing_and_have_the_prices_of_here(
    gate, tmp_path_factory, monkeypatch, first, last, code
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    offer(elsewhere, monkeypatch, v1_0=64, v2_0=96)
    gate.extend_conftest(SAYS_ITS_PROFILES.format(str(elsewhere / "profiles.txt")))
    root = written(gate, MADE_UP, 3, planted=2, ini=INI)
    before = gate.files()
    files = ("report.xml", "benchmark.json", "report.html")
    written_by = ("--junitxml", "--benchmark-json", "--magis-report")
    given = [f"{option}={root / name}" for option, name in zip(written_by, files, strict=True)]
    assert main(["bisect", first, last, *ARGS, *given]) == code
    left = {name for name in gate.files() if name not in before and not name.startswith(".")}  # rustup's, in a home
    assert left <= {"calls.txt"}
    places = (elsewhere / "profiles.txt").read_text().splitlines()
    assert set(places) == {str(root / "stored" / "profiles")}
