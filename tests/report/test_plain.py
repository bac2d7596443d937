"""Results as plain JSON types and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from magis.errors import UsageError
from magis.plain_records import from_plain, to_plain
from magis.results import CaseResult, ModuleBytes, Peak, Span, Timelines


def test_round_trip_through_json(measured, simulated):
    for result in (measured, simulated):
        assert from_plain(CaseResult, json.loads(json.dumps(to_plain(result)))) == result


def test_tables_and_time_lines_travel(measured):
    row = ModuleBytes("activation", "layers.0", 12, 1, "net.py:3")
    peak = Peak("aten.mm.default", "layers.0", "forward", "net.py:3", (row, row), 7, "aten.bmm.default", "layers.1")
    span = Span("aten.mm.default", "layers.0", "forward", "net.py:3", 1.0, 0.5, 12, "to host", again=True)
    result = replace(
        measured,
        original=replace(measured.original, at_peak=peak),
        search=replace(measured.search, changes=(row,)),
        timelines=Timelines((span,), (span, span)),
    )
    assert from_plain(CaseResult, json.loads(json.dumps(to_plain(result)))) == result


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("case", "model"), 3, "result.case.model: expected text, found 3"),
        (("case", "memory_ratio"), "0.8", "result.case.memory_ratio: expected a number, found '0.8'"),
        (("original",), None, "result.original: expected an object, found None"),
        (
            ("original", "measured", "peak_bytes"),
            True,
            "result.original.measured.peak_bytes: expected a whole number, found True",
        ),
        (("identity",), [], "result.identity: expected an object, found a list"),
        (("search", "changes"), "x", "result.search.changes: expected a list, found 'x'"),
        (("search", "changes"), [{}], "result.search.changes[0]: 'count' is missing"),
        (("identity", "torch"), 2, "result.identity['torch']: expected text, found 2"),
        (("colour",), "red", "result: unknown entry 'colour'"),
        (("search", "colour"), "red", "result.search: unknown entry 'colour'"),
    ],
)
def test_anything_else_is_refused(measured, place, value, message):
    plain = to_plain(measured)
    inner = plain
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(UsageError) as caught:
        from_plain(CaseResult, plain, "result")
    assert str(caught.value) == message


def test_a_missing_field_is_named(measured):
    plain = to_plain(measured)
    del plain["original"]["simulated_ms"]
    with pytest.raises(UsageError, match=r"result\.original: 'simulated_ms' is missing"):
        from_plain(CaseResult, plain, "result")


def test_fields_with_a_default_may_be_missing(measured):
    plain = to_plain(measured)
    del plain["note"], plain["search"]["states"], plain["planning_workspaces"]
    found = from_plain(CaseResult, plain, "result")
    assert (found.note, found.search.states, found.planning_workspaces) == ("", 0, {})
