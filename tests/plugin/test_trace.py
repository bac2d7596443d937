"""`--magis-trace`: a file per case that Perfetto opens."""

from __future__ import annotations

import json

RUN = ("--magis-models=bert", "--magis-trace=out/traces")


def events(gate, name):
    return json.loads((gate.root / "out/traces" / name).read_text())["traceEvents"]


def test_every_case_has_a_file_with_all_of_its_calls(gate, workers):
    gate.fake(any_case={"held": {"layers.0": 10}})
    gate.accept("--magis-models=bert")
    result = gate(*RUN, workers=workers)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["traces: *out/traces (3 files)"])
    names = sorted(path.name for path in (gate.root / "out/traces").iterdir())
    assert names == ["bert@eager.json", "bert@magis-mem0.6.json", "bert@magis-mem0.8.json"]
    found = events(gate, "bert@magis-mem0.8.json")
    calls = [event for event in found if event["ph"] == "X" and event["name"] == "aten.mm.default"]
    assert len(calls) == 2 * 1800  # not thinned
    assert {event["pid"] for event in found} == {1, 2}
    tracks = {event["args"]["name"] for event in found if event.get("name") == "thread_name"}
    assert tracks == {"compute", "to host"}
    assert calls[0]["args"]["module"] == "layers.0"
    assert (calls[1]["ts"], calls[1]["dur"]) == (1000.0, 1000.0)  # microseconds
    levels = [event["args"]["bytes"] for event in found if event["ph"] == "C" and event["pid"] == 1]
    assert max(levels) == int(gate.rows()[0]["ori peak bytes"])
    assert {event["pid"] for event in events(gate, "bert@eager.json")} == {1}


def test_a_core_without_time_lines_writes_none(gate):
    gate.accept("--magis-models=bert")
    gate(*RUN).assert_outcomes(passed=3)
    assert not (gate.root / "out").exists()
