"""`magis rebase`: what an upgrade moved is stored anew, what the code moved stays."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from magis.cli.main import main
from magis.extensions.versions import environment_of
from tests.plugin.wheels import offer, wheel_of

# On the made-up core one case of bert hangs on the release of net-width; here none is installed.

BY_RELEASE = """
made_up = figures

def figures(root, name):
    figure = made_up(root, name)
    try:
        import net_width
    except ImportError:
        return figure
    return figure | {"opt_tensor": 0.95} if name == "bert[magis-mem0.8]" else figure
"""
INI = "[pytest]\naddopts = -p pytest_magis.plugin -p no:cacheprovider\nmagis_report = all.html\n"
BERT = "--magis-models=bert"
BY_PACKAGE, BY_CODE = "bert[magis-mem0.8]", "bert[magis-mem0.6]"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture
def upgraded(gate, shelf, monkeypatch):
    """A project whose baselines were stored with net-width 1.0, once for all tests."""
    offer(shelf, monkeypatch, v1_0=64)
    gate.pytester.makeini(INI)
    gate.extend_conftest(BY_RELEASE)
    if not (shelf / "stored").exists():
        store(gate, BERT)
        shutil.copytree(gate.root, shelf / "stored", ignore=shutil.ignore_patterns("runpytest-*", "__pycache__"))
    else:
        shutil.copytree(shelf / "stored", gate.root, dirs_exist_ok=True)
    return gate


def store(gate, *arguments):
    python = environment_of(["net-width==1.0"], lambda _text: None, gate.root)
    command = [python, "-m", "pytest", *arguments, "--magis-update=new", "-o", "magis_report="]
    done = subprocess.run(command, cwd=gate.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def files(gate):
    return {name: text for name, text in gate.files().items() if not name.startswith(("calls.txt", "."))}


def entries(gate):
    (configuration,) = gate.baseline()["configurations"].values()
    return configuration["cases"]


def changed(before, after):
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_what_the_environment_moved_is_updated_and_what_the_code_moved_is_left(upgraded, capsys):
    upgraded.fake(**{BY_CODE: {"opt_tensor": 1.005}})
    before, cases = files(upgraded), entries(upgraded)
    junit = f"--junitxml={upgraded.root / 'out.xml'}"
    assert main(["rebase", "net-width==1.0", "--", BERT, junit]) == 1
    out, _ = capsys.readouterr()
    updated, left, said = out.splitlines()
    stored, here = cases["magis-mem0.8"], entries(upgraded)["magis-mem0.8"]
    was, now = stored["optimized_tensor_bytes"], here["optimized_tensor_bytes"]
    assert was < now
    assert updated.startswith(f"updated {BY_PACKAGE}: optimized tensor bytes: {now:,} (")
    assert f"allowed {was:,} (" in updated
    assert left.startswith(f"left {BY_CODE}: the code moved it: with net-width==1.0 optimized tensor bytes: ")
    assert "; here optimized tensor bytes: " in left
    assert said == "3 cases, compared with net-width==1.0: 1 updated, 1 still red"
    assert changed(before, files(upgraded)) == {"baselines/cpu/bert.json"}
    assert changed(cases, entries(upgraded)) == {"magis-mem0.8"}
    after = files(upgraded)
    assert main(["rebase", "net-width==1.0", "--", BERT]) == 1
    assert capsys.readouterr().out.splitlines() == [left, said.replace("1 updated", "0 updated")]
    assert files(upgraded) == after


def test_what_moved_by_both_is_left_and_one_case_can_be_asked_for(upgraded, capsys):
    upgraded.fake(any_case={"opt_tensor": 1.005})
    upgraded.extend_conftest(BY_RELEASE.replace("made_up", "by_release").replace("0.95", "0.96"))
    before = files(upgraded)
    assert main(["rebase", "net-width==1.0", "--case", BY_PACKAGE, "--", BERT]) == 1
    out, _ = capsys.readouterr()
    assert out.startswith(f"left {BY_PACKAGE}: the code moved it: ")
    assert out.endswith("\n1 case, compared with net-width==1.0: 0 updated, 1 still red\n")
    assert files(upgraded) == before


def test_where_nothing_moved_nothing_else_is_measured(upgraded, capsys):
    before = files(upgraded)
    assert main(["rebase", "net-width==1.0", "--", BERT, "--magis-strategies=eager"]) == 0
    out, err = capsys.readouterr()
    assert out == "1 case, none moved: 0 updated, 0 still red\n"
    assert err.count("measuring") == 1
    assert files(upgraded) == before


def test_the_release_of_torch_is_the_one_that_the_baselines_name(upgraded, shelf, capsys):
    wheel_of(shelf, "1.0", 64, package="torch")
    path = upgraded.root / "baselines" / "cpu" / "bert.json"
    path.write_text(path.read_text().replace("torch=2.13.0", "torch=1.0+cpu"))
    assert main(["rebase", "--", BERT]) == 1
    out, _ = capsys.readouterr()
    assert out.endswith("\n3 cases, compared with torch==1.0: 1 updated, 2 still red\n")
    simulated = ("--magis-device=sim:rtx3090", BERT)
    store(upgraded, *simulated)
    assert main(["rebase", "--", *simulated]) == 4
    assert "the baselines do not say with which releases they were stored; name them: " in capsys.readouterr().err


AS_TORCH = """
from importlib.metadata import version
made_result = make_result

def make_result(case, figure):
    result = made_result(case, figure)
    return replace(result, identity=result.identity | {"torch": version("torch")})
"""


def test_another_torch_is_another_device_and_is_measured_where_the_code_moved_nothing(upgraded, shelf, capsys):
    wheel_of(shelf, "1.0", 64, package="torch")
    upgraded.extend_conftest(AS_TORCH)
    path = upgraded.root / "baselines" / "cpu" / "bert.json"
    path.write_text(path.read_text().replace("torch=2.13.0", "torch=1.0"))
    stored = upgraded.baseline()
    (configuration,) = stored["configurations"].values()
    ((_, measured),) = configuration["cases"]["magis-mem0.6"]["measured"].items()
    measured["optimized_peak_bytes"] = 999  # as if the code had since needed more
    path.write_text(json.dumps(stored))
    before = entries(upgraded)
    assert main(["rebase", "--", BERT]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "updated bert[eager]: measured with torch 2.13.0" in lines
    (left,) = (line for line in lines if line.startswith("left"))
    said = "peaks not compared: the baseline has no measurement of this device with torch 2.13.0; with torch==1.0 "
    assert left.startswith(f"left {BY_CODE}: {said}optimized peak bytes: ")
    assert left.endswith("; accept with --magis-update=new")
    assert lines[-1] == "3 cases, compared with torch==1.0: 2 updated, 1 still red"
    assert changed(before, entries(upgraded)) == {"eager", "magis-mem0.8"}
    old, new = entries(upgraded)["eager"]["measured"].items()
    assert sorted(("torch=1.0" in key for key, _ in (old, new))) == [False, True]
    assert old[1] == new[1]


# On the real core: a layer whose width is that of the package, one whose width is the project's, and one that has both
