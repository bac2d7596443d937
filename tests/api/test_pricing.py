"""Which profile prices a device; everything else about it is one line, and the file stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from magis.cases.run_case import run_case
from magis.cost.profile_store import Entry, Profile, ProfileError, save
from magis.planner.bench import Bench
from magis.planner.device_profiles import UNPRICED, Profiles, profile_file, recording_identity
from magis.results import Case
from magis.runtime.measure import device_identity
from magis.runtime.profiler import schema_of

H200 = {"device": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0"}
MM = "aten.mm.default(float32[64,64]{64,1}, float32[64,64]{64,1})"


def written(path: Path, device: dict[str, str], key: str = MM, **more: object) -> Path:
    save(Profile(device, {key: Entry(5, 1, 0, 9)}, **more), path)  # type: ignore[arg-type]
    return path


def test_a_simulated_gpu_takes_the_profile_of_that_gpu(tmp_path: Path) -> None:
    written(tmp_path / "h200.json", H200)
    found = Profiles(folder=tmp_path).pricing("sim:h200", "float32")
    assert found.profile is not None
    assert found.source == "h200.json (NVIDIA H200, torch 2.11.0)"
    assert (found.note, len(found.digest)) == ("", 12)
    assert Profiles(folder=tmp_path).pricing("sim:a100") == UNPRICED
    assert Profiles().pricing("sim:h200") == UNPRICED


def test_products_in_tf32_are_priced_by_a_profile_of_tf32_alone(tmp_path: Path) -> None:
    written(tmp_path / "h200.json", H200)
    written(tmp_path / "h200-tf32.json", {**H200, "products": "tf32"})
    for dtype, name in (("float32", "h200.json"), ("tf32", "h200-tf32.json"), ("amp-bfloat16", "h200.json")):
        assert profile_file(tmp_path, "sim:h200", dtype).name == name
    found = Profiles(folder=tmp_path).pricing("sim:h200", "tf32")
    assert found.source.startswith("h200-tf32.json")
    with pytest.raises(ProfileError, match="is of products in float32, the case's are in tf32"):
        Profiles(file=tmp_path / "h200.json").pricing("sim:h200", "tf32")
    with pytest.raises(ProfileError, match="is of products in tf32, the case's are in float32"):
        Profiles(file=tmp_path / "h200-tf32.json").pricing("sim:h200", "float32")
    assert recording_identity("cpu") == device_identity("cpu")
    assert recording_identity("cpu", "tf32") == {**device_identity("cpu"), "products": "tf32"}


def test_operators_that_changed_are_named_and_left_out(tmp_path: Path) -> None:
    changed = {"aten.mm.default": "aten::mm(Tensor self) -> Tensor"}
    path = written(tmp_path / "h200.json", H200, schemas=changed)
    found = Profiles(file=path).pricing("sim:h200")
    assert found.note == "1 operators differ from those of torch 2.11.0: aten.mm.default"
    assert found.profile is not None
    assert not found.profile.entries
    same = {"aten.mm.default": str(schema_of("aten.mm.default"))}
    assert Profiles(file=written(path, H200, schemas=same)).pricing("sim:h200").note == ""


def test_a_simulated_row_is_priced_by_the_profile_and_says_so(tmp_path: Path) -> None:
    """Plans with other prices are other plans: the identity says which they were."""
    case = Case("mlp", "eager", "sim:h200", "small")
    plain = run_case(case)
    assert (plain.provenance.estimated, plain.provenance.source) == (1.0, "")
    assert "profile" not in plain.identity
    bench = Bench()
    graph = bench.subject(case).captured.original.graph
    from magis.cost.operator_latency import signatures_of

    entries = {key: Entry(7_000, 0, 0, 9) for key in signatures_of(graph)}
    path = tmp_path / "h200.json"
    save(Profile(H200, entries), path)
    priced = run_case(case, cache=Bench(profiles=Profiles(file=path)))
    assert priced.provenance.measured == 1.0
    assert priced.provenance.source.startswith("h200.json (NVIDIA H200")
    assert priced.identity["profile"] == priced.provenance.digest
    # views take no time, with a profile or without
    timed = [op for op in graph.ops if bench.subject(case).roofline.nanoseconds(op, graph.values)]
    assert priced.original.simulated_ms == pytest.approx(len(timed) * 0.007)
    assert priced.original.simulated == plain.original.simulated  # bytes have nothing to do with it


def test_on_a_cpu_a_profile_predicts_and_plans_stay_as_they_are(tmp_path: Path) -> None:
    case = Case("mlp", "magis", "cpu", "small", memory_ratio=0.8, timing_rounds=1)
    plain = run_case(case)
    from magis.frontends.profiling import signatures_of_model

    keys = signatures_of_model(Bench().subject(case))
    path = tmp_path / "cpu.json"
    save(Profile(device_identity("cpu"), {key: Entry(3_000, 0, 0, 9) for key in keys}), path)
    priced = run_case(case, cache=Bench(profiles=Profiles(file=path)))
    assert priced.provenance.measured == 1.0  # every form in which a plan may hold an operator was listed
    assert "profile" not in priced.identity
    assert priced.optimized.simulated == plain.optimized.simulated
    assert priced.search.states == plain.search.states
    assert priced.planning_workspaces == plain.planning_workspaces
    assert priced.optimized.simulated_ms != plain.optimized.simulated_ms
