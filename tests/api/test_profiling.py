"""Recording a profile: nothing twice, nothing lost, nothing of another device, every operator that a plan may hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from magis.cost.operator_latency import signatures_of
from magis.cost.profile_store import Entry, Profile, ProfileError, load, save
from magis.frontends import profiling
from magis.frontends.profiling import record_profile, signatures_of_model
from magis.planner.bench import Bench
from magis.planner.planning import plan
from magis.results import Case
from magis.runtime import profiler
from magis.runtime.measure import device_identity
from magis.runtime.profiler import ProfilingEffort
from magis.units import MIB

QUICK = ProfilingEffort(batch_bytes=256 * MIB, rounds=5)


def recorded(path: Path, **how: object):  # type: ignore[no-untyped-def]
    settings = {"device": "cpu", "preset": "small", "effort": QUICK, "parts": False, **how}
    return record_profile(path, ["mlp"], **settings)  # type: ignore[arg-type]


def test_every_operator_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "cpu.json"
    found = recorded(path)
    first = load(path)
    subject = Bench().subject(Case("mlp", "magis", "cpu", "small"))
    assert set(first.entries) == set(signatures_of_model(subject, parts=False))
    assert (found.operators, found.wanted, found.missing, found.in_time) == (len(first.entries),) * 2 + ((), True)
    assert dict(first.device) == device_identity("cpu")
    assert set(first.schemas) == {key.partition("(")[0] for key in first.entries}

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("magis.frontends.profiling.record", refuse)
    assert recorded(path) == found
    assert load(path) == first


def test_a_recording_that_is_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.json"
    small = ProfilingEffort(batch_bytes=2 * MIB, rounds=5)
    real, calls = profiler.record, []

    def cut_off(batch: profiler.CallBatch, *rest: object) -> dict[str, Entry]:
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("magis.frontends.profiling.record", cut_off)
    with pytest.raises(KeyboardInterrupt):
        recorded(path, effort=small)
    known = load(path)
    assert set(known.entries) == {*calls[0].keys, *calls[1].keys}
    found = recorded(path, effort=small)
    after = load(path)
    assert found.in_time
    assert known.entries.items() <= after.entries.items()
    again = [key for batch in calls[3:] for key in batch.keys]
    assert not set(again) & set(known.entries)


def test_two_recordings_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another one put into the file while a batch was measured is still there afterwards."""
    path = tmp_path / "cpu.json"
    real, others = profiler.record, []

    def meanwhile(batch: profiler.CallBatch, *rest: object) -> dict[str, Entry]:
        key = f"other{len(others)}(a)"
        others.append(key)
        known = load(path)
        save(Profile(known.device, {**known.entries, key: Entry(7, 0, 0, 9)}, known.schemas), path)
        return real(batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("magis.frontends.profiling.record", meanwhile)
    recorded(path, effort=ProfilingEffort(batch_bytes=2 * MIB, rounds=5))
    assert len(others) > 1
    assert set(others) <= set(load(path).entries)


def test_seconds_end_it_and_the_rest_is_named(tmp_path: Path) -> None:
    found = recorded(tmp_path / "cpu.json", seconds=1e-9)
    assert not found.in_time
    assert (found.operators, len(found.missing)) == (0, found.wanted)
    assert load(tmp_path / "cpu.json").entries == {}


@pytest.mark.parametrize("other", [{"torch": "1.0"}, {"threads": "99"}, {"device": "cuda"}])
def test_another_devices_file_is_left_alone(tmp_path: Path, other: dict[str, str]) -> None:
    path = tmp_path / "cpu.json"
    save(Profile({**device_identity("cpu"), **other}, {"k": Entry(1, 1, 1, 1)}), path)
    before = path.read_bytes()
    with pytest.raises(ProfileError, match=r"profiles of different devices: .*keep one file per device"):
        recorded(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("model", "ratio"), [("seed-bert", 0.4), ("seed-unet", 0.5)])
def test_plans_hold_no_operator_that_was_not_listed(model: str, ratio: float) -> None:
    """Recomputed, in place, and in parts: what the search comes up with has been foreseen."""
    subject = Bench().subject(Case(model, "magis", "sim:h200", "small"))
    limit = int(ratio * subject.original.peak_bytes)
    settings = {"budget": 300, "seconds": None, "seed": 0, "stored": None}
    found = plan(subject, memory_limit=limit, latency_limit_ns=None, **settings)  # type: ignore[arg-type]
    listed = set(signatures_of_model(subject))
    assert set(signatures_of(found.graph)) <= listed
    assert dataclasses.is_dataclass(found)


def test_a_gpu_is_filled_to_a_quarter_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "free_device_memory", lambda _device: 100 * 2**30)
    assert profiling._batch_bytes("cuda") == 25 * 2**30
    assert profiling._batch_bytes("cpu") == ProfilingEffort.batch_bytes
