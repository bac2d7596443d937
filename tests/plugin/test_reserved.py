"""Limits and baselines of reserved bytes: `--magis-memory-limit-of`, `memory_limit_of` of a mark."""

from __future__ import annotations

import json

import pytest

SIM = ("--magis-models=bert", "--magis-device=sim:rtx3090", "--magis-memory-ratios=0.8")
RESERVED = (*SIM, "--magis-memory-limit-of=reserved", "--magis-csv-full")
LABEL = "magis-mem0.8-reserved"
HELD = {"ori_reserved": 1.5, "opt_reserved": 1.25}


def measured(gate, label="magis-mem0.8"):
    (found,) = gate.baseline(device="sim-rtx3090")["configurations"]["paper"]["cases"][label]["measured"].values()
    return found


def without_reserved(gate):
    """The baseline as a version wrote it that knew no reserved bytes."""
    path = gate.root / "baselines" / "sim-rtx3090" / "bert.json"
    data = json.loads(path.read_text())
    for case in data["configurations"]["paper"]["cases"].values():
        for figures in case["measured"].values():
            del figures["original_reserved_bytes"], figures["optimized_reserved_bytes"]
    path.write_text(json.dumps(data))


def test_baselines_hold_them_and_more_is_red(gate, workers):
    gate.fake(any_case=HELD)
    gate.accept(*SIM)
    stored = measured(gate)
    assert stored["original_reserved_bytes"] > stored["original_peak_bytes"]
    gate(*SIM).assert_outcomes(passed=2)
    gate.fake(any_case=HELD | {"opt_reserved": 1.3})
    result = gate(*SIM, workers=workers)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "worse: optimized reserved bytes: *, allowed *, +4.0%",
            "the peak did not grow: *gaps*",
            "accept with: pytest *--magis-update=worse",
        ]
    )
    gate(*SIM, "--magis-memory-tolerance=0.05").assert_outcomes(passed=2)
    gate.fake(any_case=HELD | {"ori_reserved": 1.4})
    result = gate(*SIM, "--magis-strict")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["better: original reserved bytes: *, baseline *, -6.7%"])


def test_a_baseline_without_them_passes_until_they_are_added(gate):
    gate.fake(any_case=HELD)
    gate.accept(*SIM)
    expected = gate.files()["baselines/sim-rtx3090/bert.json"]
    without_reserved(gate)
    gate.fake(any_case=HELD | {"opt_reserved": 9.0})
    result = gate(*SIM)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*reserved bytes are not gated: the baseline has none; --magis-update=new adds them"])
    gate.fake(any_case=HELD)
    gate.accept(*SIM)
    assert gate.files()["baselines/sim-rtx3090/bert.json"] == expected


def test_a_limit_of_reserved_bytes_is_a_case_of_its_own(gate, node_ids):
    gate.fake(any_case=HELD | {"opt_reserved": 1.4})
    gate.accept(*RESERVED)
    assert measured(gate, LABEL)["memory_limit_bytes"] == int(0.8 * measured(gate, LABEL)["original_reserved_bytes"])
    result = gate(*RESERVED)
    result.stdout.fnmatch_lines(["bert * magis * reserved 0.8 * pass"])
    eager, row = gate.rows()
    assert (eager["memory limit of"], row["memory limit of"]) == ("", "reserved")
    assert int(row["memory limit bytes"]) == int(0.8 * int(row["ori reserved bytes (predicted)"]))
    reached = int(row["opt reserved bytes (predicted)"]) / int(row["ori reserved bytes (predicted)"])
    assert float(row["memory ratio reached (opt/ori)"]) == pytest.approx(reached)
    (gate.root / "pytest.ini").write_text("[pytest]\nmagis_memory_limit_of = reserved\n")
    assert node_ids(gate(*SIM, "--collect-only", "-q"))[1] == f"magis::bert[{LABEL}]"
    assert (
        node_ids(gate(*SIM, "--magis-memory-limit-of=peak", "--collect-only", "-q"))[1] == "magis::bert[magis-mem0.8]"
    )


def test_settings_of_the_allocator_make_cases_of_their_own(gate, monkeypatch):
    growing = "expandable_segments:True"
    gate.fake(any_case=HELD)
    gate.accept(*SIM)
    cases = gate.baseline(device="sim-rtx3090")["configurations"]["paper"]["cases"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", growing)
    gate(*SIM).assert_outcomes(passed=2)
    gate.accept(*SIM, f"--magis-allocator={growing}")
    both = gate.baseline(device="sim-rtx3090")["configurations"]["paper"]["cases"]
    assert both == cases | {f"{label} allocator={growing}": case for label, case in cases.items()}
    gate(*SIM, "--magis-allocator=backend:native").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("max_split_size_mb:1", "allocator: max_split_size_mb:1: must be at least 20"),
        ("backend:cudaMallocAsync", "allocator: backend:cudaMallocAsync: not simulated"),
    ],
)
def test_other_settings_are_refused_before_a_case_runs(gate, given, said):
    result = gate(*SIM, f"--magis-allocator={given}")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"ERROR: {said}*"])


def test_a_cpu_has_no_allocator_to_set(gate):
    result = gate("--magis-models=bert", "--magis-device=cpu", "--magis-allocator=expandable_segments:True")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: allocator: a CPU has no caching allocator*"])
