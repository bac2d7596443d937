"""--magis-profile: what prices latencies; whatever is wrong with it is one line before anything runs."""

from __future__ import annotations

import json

import pytest

from magis.cost.profile_store import Entry, Profile, save

H200 = {"device": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0"}
MM = "aten.mm.default(float32[64,64]{64,1}, float32[64,64]{64,1})"
RUN = (
    "--magis-models=own_nets:undeclared",
    "--magis-device=sim:h200",
    "--magis-strategies=eager",
    "--magis-update=new",
    "--magis-csv-full",
)


def kept(gate, name, device, entries=None, **more):
    save(Profile(device, entries or {MM: Entry(5, 0, 0, 9)}, **more), gate.root / name)
    return gate.root / name


def test_a_profile_in_its_place_prices_and_the_report_says_how_much(gate):
    gate.use_real_core()
    gate(*RUN).assert_outcomes(passed=1)
    (plain,) = gate.rows()
    assert (plain["priced by"], float(plain["estimated latency share"])) == ("", 1.0)

    relu = "aten.relu.default(float32[%d,64]{64,1})"
    entries = {relu % size: Entry(1000 * size, 0, 0, 9) for size in (1, 2, 4)}
    changed = {"aten.mm.default": "aten::mm(Tensor self) -> Tensor"}
    kept(gate, "baselines/profiles/h200.json", H200, {**entries, MM: Entry(5, 0, 0, 9)}, schemas=changed)
    result = gate(*RUN)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "latencies priced by h200.json (NVIDIA H200, torch 2.11.0): at least *% measured, at most *% estimated",
            "note: 1 operators differ from those of torch 2.11.0: aten.mm.default",
        ]
    )
    (priced,) = gate.rows()
    assert priced["priced by"] == "h200.json (NVIDIA H200, torch 2.11.0)"
    shares = [float(priced[f"{kind} latency share"]) for kind in ("measured", "interpolated", "estimated")]
    assert sum(shares) == pytest.approx(1)
    (path,) = (gate.root / "baselines" / "sim-h200").iterdir()
    identities = str(json.loads(path.read_text()))
    assert "'any machine'" in identities
    assert "'any machine, profile=" in identities  # other prices, other plans: kept apart

    gate(*RUN, "--magis-profile=none").assert_outcomes(passed=1)
    assert gate.rows()[0]["priced by"] == ""
