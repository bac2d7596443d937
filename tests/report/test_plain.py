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
        (("case", "model"), 3, "result.case.model: expected str, found int"),
        (("case", "memory_ratio"), "0.8", "result.case.memory_ratio: expected float, found str"),
        (("original",), None, "result.original: expected a record, found NoneType"),
        (("original", "measured", "peak_bytes"), True, "result.original.measured.peak_bytes: expected int, found bool"),
        (("identity",), [], "result.identity: expected a dictionary, found list"),
        (("search", "changes"), "x", "result.search.changes: expected a list, found str"),
        (("search", "changes"), [{}], "result.search.changes[0]: field 'kind' is missing"),
        (("identity", "torch"), 2, "result.identity.torch: expected str, found int"),
        (("colour",), "red", "result: unknown field 'colour'"),
        (("search", "colour"), "red", "result.search: unknown field 'colour'"),
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
