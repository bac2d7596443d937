"""What a red case says of the modules that grew, and what a baseline keeps for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from magis.results import ModuleBytes, Peak, collapsed
from pytest_magis.baseline_files import parse, render
from pytest_magis.baselines import held_before, stored_case, updated
from pytest_magis.explain import STORED, as_table, growths, why_more
from pytest_magis.verdict import judge
from tests.plugin.verdicts import result

PATHS = st.lists(st.sampled_from("abc"), max_size=4).map(".".join)
ROWS = st.lists(
    st.builds(ModuleBytes, st.sampled_from(["activation", "state"]), PATHS, st.integers(1, 99), st.integers(1, 3)),
    max_size=30,
    unique_by=lambda row: (row.kind, row.module),
).map(tuple)


def peak(*rows: ModuleBytes) -> Peak:
    return Peak("aten.mm.default", "layers.1", "forward", "net.py:3", rows)


def table_of(rows, most):
    return as_table(peak(*collapsed(rows, most)))


@given(ROWS, ROWS, st.integers(1, 30), st.integers(1, 30))
def test_growth_adds_up_however_the_sides_are_put_together(now, before, most_now, most_before):
    found = growths(peak(*collapsed(now, most_now)), table_of(before, most_before))
    assert sum(each.nbytes for each in found) == sum(r.nbytes for r in now) - sum(r.nbytes for r in before)
    assert all(each.nbytes for each in found)


@given(ROWS, st.integers(1, 30), st.integers(1, 30), st.data())
def test_one_module_that_grew_is_all_that_is_told(rows, most_now, most_before, data):
    if not rows:
        return
    grown = data.draw(st.sampled_from(rows))
    now = tuple(replace(row, nbytes=row.nbytes + 7) if row == grown else row for row in rows)
    (found,) = growths(peak(*collapsed(now, most_now)), table_of(rows, most_before))
    assert (found.nbytes, found.row.kind) == (7, grown.kind)
    name = found.row.module
    assert name == grown.module or grown.module.startswith(name.removesuffix("*"))


def test_the_line_names_modules_kinds_lines_and_the_rest():
    before = table_of([ModuleBytes("activation", "layers.0.up", 1024, 1), ModuleBytes("state", "", 4096, 2)], 9)
    now = peak(
        ModuleBytes("activation", "layers.0.up", 3 * 1024, 3, "net.py:31"),
        ModuleBytes("parameter", "layers.0.up", 512, 1),
        ModuleBytes("state", "", 4000, 1),
    )
    assert why_more("original", now, before) == (
        "grew at the peak: layers.0.up +2.50 KiB (3 activations at net.py:31, 1 parameter), others -96 B; "
        "the peak is at aten.mm.default of layers.1 (forward, net.py:3)"
    )
    assert why_more("original", now, None).startswith("at the peak most is held by (no sub-module) 3.91 KiB (1 optim")
    assert why_more("original", None, before) == ""
    same = replace(now, held=now.held[:1], scratch_bytes=64, scratch_op="aten.bmm.default", scratch_module="x")
    assert why_more("optimized", same, as_table(same)) == (
        "the tensors of the optimized step did not grow; its peak has 64 B of scratch of aten.bmm.default of x"
    )


def with_peaks(case, original, optimized):
    return replace(
        case,
        original=replace(case.original, at_peak=peak(original)),
        optimized=replace(case.optimized, at_peak=peak(optimized)),
    )


SMALL, LARGE = ModuleBytes("activation", "a", 700, 1), ModuleBytes("activation", "a", 820, 1)


def test_a_finding_says_what_grew_in_the_step_that_it_is_about():
    before = with_peaks(result(), replace(SMALL, nbytes=1000), SMALL)
    baseline = updated(None, "bert", "label", before.case, before)
    stored = stored_case(baseline, "label", before.case)
    held = held_before(baseline, "label", before.case)
    now = with_peaks(result(opt=(820, 830)), replace(SMALL, nbytes=1000), LARGE)
    (finding,) = judge(now, stored, held=held).findings
    assert finding.text.startswith("optimized tensor bytes")
    assert finding.why.startswith("grew at the peak: a +120 B (1 activation)")
    assert judge(before, stored, held=held).findings == ()


def test_a_table_is_kept_once_and_goes_with_the_last_case_that_names_it():
    case = with_peaks(result(), replace(SMALL, nbytes=1000), SMALL)
    baseline = updated(updated(None, "bert", "one", case.case, case), "bert", "two", case.case, case)
    configuration = baseline.configurations["small"]
    assert len(configuration.held) == 2
    assert parse(render(baseline), Path("x.json")) == baseline
    changed = with_peaks(result(), replace(SMALL, nbytes=1000), LARGE)
    once = updated(baseline, "bert", "one", case.case, changed)
    assert len(once.configurations["small"].held) == 3
    twice = updated(once, "bert", "two", case.case, changed)
    assert len(twice.configurations["small"].held) == 2


def test_an_older_baseline_passes_and_takes_its_tables_with_the_next_update():
    plain, case = result(), with_peaks(result(), replace(SMALL, nbytes=1000), SMALL)
    old = stored_case(updated(None, "bert", "label", plain.case, plain), "label", plain.case)
    assert old is not None
    assert old.original_held is None
    assert judge(case, old).label == "pass"
    verdict = judge(case, old, permissions=frozenset({"new"}))
    assert (verdict.label, verdict.store) == ("accepted new", True)


def test_what_a_baseline_keeps_is_short():
    rows = [ModuleBytes("activation", f"layers.{i}.{name}", 100 + i, 1) for i in range(60) for name in "abcde"]
    table = as_table(peak(*rows))
    assert sum(len(modules) for modules in table.values()) <= STORED
    assert sum(table["activation"].values()) == sum(row.nbytes for row in rows)
