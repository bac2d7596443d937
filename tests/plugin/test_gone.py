"""Baselines of tests that are gone: named by a run that collected all tests, removed by --magis-prune."""

from __future__ import annotations

import os

import pytest

NET = """
import pytest

@pytest.mark.magis(strategies=["eager"]{named})
def test_{name}():
    pass
"""
CHECKED = """
def test_{name}(magis):
    magis.check(lambda: None, strategies=["eager"])
    magis.check(lambda: None, strategies=["eager"])
    magis.check(lambda: None, strategies=["eager"], name="{name}-own")
"""
PLAIN = "def test_plain(): pass\n"
GONE = "baselines of tests that are gone*"


def write(gate, **files):
    for name, text in files.items():
        (gate.root / f"{name}.py").write_text(text)


ACCEPTED: dict[str, bytes] = {}
"""Baselines that runs have stored, by file."""


@pytest.fixture
def stored(gate):
    """Baselines of five tests and a model, in two devices' folders."""
    gate.extend_conftest('\ndef pytest_magis_models():\n    return {"named": "nets:make"}\n')
    write(
        gate,
        nets="make = None\n",
        test_a=NET.format(name="one", named="") + NET.format(name="two", named=', name="given"'),
        test_b=CHECKED.format(name="three"),
        test_c=PLAIN,
    )
    if not ACCEPTED:  # three runs, once for all tests
        gate.accept()
        gate.accept("test_a.py", "--magis-device=sim:rtx3090")
        gate.accept("--magis-models=bert,named,nets:make", "--magis-strategies=eager")
        ACCEPTED.update((name, text) for name, text in gate.files().items() if name.startswith("baselines/") and text)
    for name, text in ACCEPTED.items():
        (gate.root / name).parent.mkdir(parents=True, exist_ok=True)
        (gate.root / name).write_bytes(text)
    (gate.root / "baselines" / "notes").mkdir()
    (gate.root / "baselines" / "notes" / "mine.json").write_text("{}")
    return {name for name in gate.files() if name.endswith(".json")}


def left(gate):
    return {name for name in gate.files() if name.endswith(".json")}


OF_A = {"cpu/test_a.test_one", "cpu/given", "sim-rtx3090/test_a.test_one", "sim-rtx3090/given"}
OF_B = {"cpu/test_b.test_three", "cpu/test_b.test_three.2", "cpu/three-own"}


SKIPPED = "import pytest\npytestmark = pytest.mark.skip\n"


@pytest.mark.parametrize(
    ("changed", "gone"),
    [
        ({}, set()),
        ({"test_a": ""}, OF_A),
        ({"test_a": NET.format(name="one", named="")}, {"cpu/given", "sim-rtx3090/given"}),
        ({"test_a": SKIPPED + NET.format(name="one", named="")}, {"cpu/given", "sim-rtx3090/given"}),
        ({"test_b": PLAIN}, OF_B),
        ({"test_b": CHECKED.format(name="renamed")}, OF_B),
        ({"test_a": PLAIN, "test_b": ""}, OF_A | OF_B),
    ],
)
def test_a_run_of_all_tests_names_them_and_prune_removes_them(gate, stored, changed, gone):
    write(gate, **changed)
    result = gate("--magis-update=new")
    assert result.ret == 0
    lines = [line for line in result.outlines if line.startswith("baselines of tests")]
    names = ", ".join(sorted(f"baselines/{name}.json" for name in gone))
    asleep = len(changed) == 2  # no test is gated any more: nothing loads the gate but --magis-prune
    told = [f"baselines of tests that are gone: {names}; --magis-prune removes them"] if gone and not asleep else []
    assert lines == told
    assert left(gate) >= stored
    result = gate("--magis-prune")
    assert result.ret == 0
    assert [line for line in result.outlines if line.startswith("baselines of tests")] == (
        [f"baselines of tests that are gone, removed: {names}"] if gone else []
    )
    assert stored - left(gate) == {f"baselines/{name}.json" for name in gone}
    gate().stdout.no_fnmatch_line(GONE)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["test_b.py"], "the run was of a part of the tests"),
        (["--magis-models=bert", "--magis-strategies=eager"], "the run was of a part of the tests"),
        (["-k", "not plain"], "tests were left out"),
        (["--deselect", "test_c.py::test_plain"], "tests were left out"),
        (["--ignore=test_c.py"], "tests were left out"),
        (["--magis-shard=1/2"], "tests were left out"),
        (["-n2"], "tests were collected by several processes"),
    ],
)
def test_a_run_of_a_part_says_nothing_and_removes_nothing(gate, stored, arguments, why):
    write(gate, test_a=PLAIN)
    result = gate(*arguments)
    assert result.ret == 0
    result.stdout.no_fnmatch_line(GONE)
    result = gate(*arguments, "--magis-prune")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines([f"ERROR: --magis-prune removes nothing: {why}*; give it to a run of all tests"])
    assert left(gate) >= stored


def test_what_cannot_be_read_to_its_end_is_no_baseline(gate, stored):
    """A pipe has none; a file of many gigabytes, even of none on the disk, has one too far away."""
    os.mkfifo(gate.root / "baselines" / "cpu" / "pipe.json")
    with (gate.root / "baselines" / "notes" / "large.json").open("w") as file:
        file.truncate(8 << 30)
    (gate.root / "baselines" / "cpu" / "endless.json").symlink_to("/dev/zero")
    write(gate, test_a=PLAIN)
    assert gate("--magis-prune").ret == 0
    assert stored - left(gate) == {f"baselines/{name}.json" for name in OF_A}


IGNORED = {
    "collect_ignore": 'collect_ignore = ["test_a.py"]\n',
    "collect_ignore_glob": 'collect_ignore_glob = ["*_a.py"]\n',
    "hook": "def pytest_ignore_collect(collection_path):\n    return collection_path.stem == 'test_a' or None\n",
    "items": "def pytest_collection_modifyitems(items):\n    items[:] = [i for i in items if 'a.py' not in i.nodeid]\n",
}
INI = {"testpaths": "testpaths = test_b.py test_c.py", "norecursedirs": "norecursedirs = deep"}


@pytest.mark.parametrize("way", [*IGNORED, *INI, "linked folder"])
def test_a_test_whose_file_was_not_collected_is_not_gone(gate, stored, way):
    """Whatever leaves a file out, a machine without a GPU, say: its tests are there, those with names of their own,
    too."""
    if way in IGNORED:
        gate.extend_conftest(f"\n{IGNORED[way]}")
    elif way == "testpaths":
        gate.pytester.makeini(f"[pytest]\n{INI[way]}\n")
    else:
        gate.pytester.makeini(f"[pytest]\n{INI.get(way, 'testpaths = test_b.py test_c.py')}\n")
        folder = gate.root / ("deep" if way in INI else ".linked")
        folder.mkdir()
        (gate.root / "test_a.py").rename(folder / "test_a.py")
        if way not in INI:
            (gate.root / "deep").symlink_to(folder)
        gate.accept("deep/test_a.py")
    before = left(gate)
    gate().stdout.no_fnmatch_line(GONE)
    result = gate("--magis-prune")
    assert result.ret == 0
    assert left(gate) == before
    if way != "items":
        result.stdout.fnmatch_lines(
            ["baselines that stay, since their tests may be in files * (*test_a.py): *given.json*"]
        )
