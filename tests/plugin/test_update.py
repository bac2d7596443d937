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


def test_new_baselines_are_written_under_xdist(gate):
    gate("--magis-models=bert,vit,mlp", "--magis-update=new", workers=2).assert_outcomes(passed=9)
    serial = gate.files()
    for name in ("bert", "vit", "mlp"):
        (gate.root / "baselines" / "cpu" / f"{name}.json").unlink()
    gate("--magis-models=bert,vit,mlp", "--magis-update=new").assert_outcomes(passed=9)
    assert {name: text for name, text in gate.files().items() if "baselines" in name} == {
        name: text for name, text in serial.items() if "baselines" in name
    }


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


def test_a_run_without_findings_writes_no_baseline(gate):
    gate.accept("--magis-models=bert")
    path = gate.root / "baselines" / "cpu" / "bert.json"
    before = (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
    gate("--magis-models=bert", "--magis-update=new,better,worse").assert_outcomes(passed=3)
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before


@pytest.mark.parametrize("change", [{"numbers": "differs: loss 1 != 2"}, {"simulator_off": 4}])
def test_what_is_broken_cannot_be_accepted(gate, change):
    gate.fake(**{"bert[magis-mem0.8]": change})
    result = gate("--magis-models=bert", "--magis-update=new,better,worse")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["broken: *", "no baseline can accept this"])
    assert "magis-mem0.8" not in gate.baseline()["configurations"]["small"]["cases"]


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


def test_a_word_of_the_command_line_covers_no_other(gate, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--magis-update=worse")
    for own in (["--magis-update=new"], ["--", "--magis-update=worse"]):
        assert "--magis-update is given for every run" in gate.refuses("--magis-models=bert", *own)


def test_in_ci_the_command_line_decides(gate, monkeypatch, workers):
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q")
    gate("--magis-models=bert", "--magis-update=new", workers=workers).assert_outcomes(passed=3)
    assert (gate.root / "baselines" / "cpu" / "bert.json").is_file()


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


def test_the_message_of_a_red_case(gate, workers):
    """A widened layer: the original and what was made of it need more."""
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"ori_tensor": 1.25, "opt_tensor": 1.25})
    result = gate("--magis-models=bert", "--magis-memory-ratios=0.8", workers=workers)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "*magis::bert[[]eager] _*",
            "worse: original tensor bytes: 1,544,308 (1.47 MiB), allowed 1,235,448 (1.18 MiB), +25.0%",
            "accept with: pytest --magis-models=bert --magis-strategies=eager --magis-update=worse",
            "*magis::bert[[]magis-mem0.8] _*",
            "worse: original tensor bytes: 1,544,308 (1.47 MiB), allowed 1,235,448 *, +25.0%; optimized +25.0%",
            "accept with: pytest --magis-models=bert --magis-strategies=magis --magis-memory-ratios=0.8 *=worse",
            "FAILED magis::bert[[]eager] - worse: original tensor bytes: 1,544,308 (1.47 MiB), allowed *",
        ]
    )
