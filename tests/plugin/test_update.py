"""--magis-update: who may store what. One permission each for new, better and worse."""

from __future__ import annotations

import pytest

CHANGES = {
    "new": {},
    "better": {"opt_tensor": 0.95},
    "worse": {"opt_tensor": 1.005},
}


@pytest.mark.parametrize("permission", ["new", "better", "worse"])
@pytest.mark.parametrize("kind", ["new", "better", "worse"])
def test_each_permission_accepts_its_own_kind_only(gate, kind, permission):
    arguments = ("--magis-models=bert", "--magis-strategies=magis", "--magis-memory-ratios=0.8")
    if kind != "new":
        gate.accept(*arguments)
    gate.fake(any_case=CHANGES[kind])
    before = gate.files()
    result = gate(*arguments, f"--magis-update={permission}")
    changed = {name for name, content in gate.files().items() if before.get(name, b"none") != content}
    stored = "baselines/cpu/bert.json" in changed
    assert stored == (kind == permission)
    # an improvement passes even where it may not be kept
    result.assert_outcomes(**({"passed": 1} if stored or kind == "better" else {"failed": 1}))


@pytest.mark.parametrize(("kind", "workers"), [("better", 0), ("worse", 0), ("worse", 2)])
def test_what_was_accepted_is_what_the_next_run_compares_with(gate, kind, workers):
    gate.accept("--magis-models=bert")
    gate.fake(any_case=CHANGES[kind])
    result = gate("--magis-models=bert", f"--magis-update={kind}", workers=workers)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines([f"*accepted, {kind}: optimized tensor bytes: *", "baseline updated: *bert.json (*)"])
    result = gate("--magis-models=bert")
    result.assert_outcomes(passed=3)
    assert {row["verdict"] for row in gate.rows()} == {"pass"}


def test_a_case_is_accepted_as_a_whole_or_not_at_all(gate):
    arguments = ("--magis-models=bert", "--magis-strategies=magis", "--magis-memory-ratios=0.8")
    gate.accept(*arguments)
    gate.fake(any_case={"opt_tensor": 0.95, "latency": 1.5})  # smaller and slower
    before = gate.baseline()
    for permission in ("better", "worse"):
        result = gate(*arguments, f"--magis-update={permission}")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["accept with: pytest *--magis-update=better,worse"])
    assert gate.baseline() == before
    gate.accept(*arguments, update="better,worse")
    assert gate.baseline() != before


def test_other_cases_stay_as_they_are(gate):
    gate.accept("--magis-models=bert,vit", "--magis-memory-ratios=0.8,0.6,0.4")
    gate.fake(any_case=CHANGES["worse"])
    before = gate.baseline()["configurations"]["small"]["cases"]
    gate.accept("--magis-models=bert", "--magis-memory-ratios=0.6", update="worse")
    after = gate.baseline()["configurations"]["small"]["cases"]
    assert {label for label in before if before[label] != after[label]} == {"magis-mem0.6"}
    assert before.keys() == after.keys()


@pytest.mark.parametrize("option", ["--magis-update=worse", "--magis-update worse", "--magis-prune"])
@pytest.mark.parametrize(
    "place",
    ["addopts", "PYTEST_ADDOPTS", "ini", "-o", "-o addopts", "-o in addopts", "file in addopts", "file in file",
     "file in PYTEST_ADDOPTS", "file", "conftest"],
)  # fmt: skip
@pytest.mark.parametrize("models", [("--magis-models=bert",), ()])
def test_what_is_given_for_every_run_accepts_nothing(gate, monkeypatch, place, option, models):
    """A decision about one run, on its command line alone: else red would be green in CI, and stay unseen."""
    flag, _, value = option.replace(" ", "=").partition("=")
    key = flag.removeprefix("--").replace("-", "_")
    (gate.root / "options.txt").write_text(option.replace(" ", "\n"))
    (gate.root / "more.txt").write_text("@options.txt\n")
    ini = {
        "addopts": f"addopts = {option}",
        "ini": f"{key} = {value or 'true'}",
        "-o in addopts": f"addopts = -o {key}={value or 'true'}",
        "file in addopts": "addopts = @options.txt",
        "file in file": "addopts = @more.txt",
    }
    gate.pytester.makeini(f"[pytest]\n{ini.get(place, '')}\n")
    given = {
        "-o": ("-o", f"{key}={value or 'true'}"),
        "-o addopts": ("-o", f"addopts={option}"),
        "file": ("@options.txt",),
    }
    environment = {"PYTEST_ADDOPTS": option, "file in PYTEST_ADDOPTS": f"@{gate.root}/options.txt"}
    if place in environment:
        monkeypatch.setenv("PYTEST_ADDOPTS", environment[place])
    if place == "conftest":
        word = ["worse"] if value else "true"
        gate.extend_conftest(f"\ndef pytest_configure(config):\n    config.option.{key} = {word!r}\n")
    said = gate.refuses(*models, *given.get(place, ()))
    where = "in the ini file, addopts, PYTEST_ADDOPTS or a file of options"
    assert said == f"ERROR: {flag} is given for every run, {where}; give it on the command line itself"


def test_a_baseline_that_breaks_during_the_run_is_kept(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case=CHANGES["worse"])
    gate.pytester.makepyfile(
        test_own="import pathlib\n"
        "def test_own(): (pathlib.Path(__file__).parent / 'baselines/cpu/bert.json').write_text('{')"
    )
    result = gate("--magis-models=bert", "--magis-update=worse", "test_own.py")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["ERROR: baseline *bert.json: not valid JSON: *"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (gate.root / "baselines/cpu/bert.json").read_text() == "{"
