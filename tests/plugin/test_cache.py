"""--magis-cache: what is kept in pytest's cache, and that nothing depends on it."""

from __future__ import annotations

import pytest

from pytest_magis.harness import _cache

NETS = """
from own_nets import nn, workload


def net():
    return workload(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))), 32)
"""
RUN = (
    "--magis-models=gated:net",
    "--magis-device=sim:h200",
    "--magis-memory-ratios=0.8",
    "--magis-budget=200",
    "--magis-csv-full",
)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ((), True),
        (("--magis-cache=plans",), True),
        (("--magis-cache=results",), True),
        (("--magis-cache=none",), False),
        (("-o", "magis_cache=none"), False),
        (("-o", "magis_cache=none", "--magis-cache=plans"), True),
        (("-p", "no:cacheprovider"), False),
    ],
)
def test_the_folder_is_in_pytests_cache(gate, arguments, kept):
    config = gate.pytester.parseconfigure("-p", "pytest_magis.plugin", *arguments)
    folder = _cache(config)
    assert (folder is not None) == kept
    if folder is not None:
        assert folder == gate.root / ".pytest_cache" / "d" / "magis"


def test_a_cache_that_cannot_be_made_is_one_warning(gate):
    (gate.root / ".pytest_cache").write_text("a file")
    config = gate.pytester.parseconfigure("-p", "pytest_magis.plugin")
    with pytest.warns(RuntimeWarning, match="nothing is kept for the next run") as said:
        assert _cache(config) is None
    assert len(said) == 1


def test_a_run_takes_up_what_is_kept(gate):
    """One result is handed back; another one is gone, and its plan damaged."""
    gate.use_real_core()
    (gate.root / "gated.py").write_text(NETS)
    folder = gate.root / ".pytest_cache" / "d" / "magis"
    gate.accept(*RUN, "--magis-cache=results", "--magis-csv=first.csv")
    (plan,) = folder.glob("plan-*.txt")
    (magis,) = (path for path in folder.glob("result-*.txt") if '"strategy": "magis"' in path.read_text())
    magis.unlink()
    whole = plan.read_text()
    plan.write_text(whole[:-20])
    result = gate(*RUN, *gate.strict, "--magis-cache=results", "--magis-csv=second.csv")
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.fnmatch_lines(["*plan-*.txt is not used, and made again: its content is not what was written"])
    result.stdout.fnmatch_lines(["gated:net?eager?: from the cache of 20*: unchanged"])
    assert plan.read_text() == whole
    tables = [gate.rows(f"{name}.csv") for name in ("first", "second")]
    for row in (row for table in tables for row in table):
        for column in ("search seconds", "note", "verdict"):  # the first run had no baseline
            del row[column]
    assert tables[0] == tables[1]
