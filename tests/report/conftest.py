"""Results to report: one that was measured, one that was simulated."""

from __future__ import annotations

import pytest

from magis.results import Case, CaseResult, Memory, Provenance, RatioInterval, SearchStats, StepFigures


@pytest.fixture
def measured() -> CaseResult:
    """bert at 0.8 on cpu, in bfloat16, with odd byte counts; the simulator is 50 bytes low."""
    return CaseResult(
        case=Case("bert", "magis", "cpu", "small", memory_ratio=0.8),
        dtype="bfloat16",
        identity={"torch": "2.13.0", "instruction set": "avx2"},
        original=StepFigures(Memory(10_000, 10_501), 8.0, Memory(10_000, 10_501), (9.75, 10.0, 10.25)),
        optimized=StepFigures(Memory(7_000, 7_950), 8.4, Memory(7_000, 8_000), (10.0, 10.5, 11.0)),
        ratio=RatioInterval(1.04, 1.03, 1.06, 15),
        weight_bytes=1_001,
        persistent_bytes=3_000,
        memory_limit_bytes=8_400,
        latency_limit_ms=None,
        device_memory_bytes=2**33,
        lower_bound_bytes=4_000,
        numbers="bit-identical",
        graph_digest="abc",
        note="a note",
        search=SearchStats(
            1.5, 321, False, True, 12, 0, "from layers.1 to the loss and back in 4 parts", worst_latency_ratio=1.05
        ),
        provenance=Provenance(0.5, 0.25, 0.25, 0.125, "h200.json (NVIDIA H200, torch 2.11.0)", "abc"),
        planning_workspaces={"aten::mm": 512},
    )


@pytest.fixture
def simulated(measured: CaseResult) -> CaseResult:
    """The same on a simulated device, under a latency limit."""
    return CaseResult(
        case=Case("bert", "magis", "sim:rtx3090", "paper", latency_ratio=1.1, dtype="float32"),
        dtype="float32",
        identity={"device": "sim:rtx3090"},
        original=StepFigures(Memory(2**60 + 4, 2**60 + 8), 8.0, reserved_bytes=2**60 + 2**21),
        optimized=StepFigures(Memory(2**59, 2**59), 8.4, reserved_bytes=2**59 + 2**22),
        ratio=None,
        weight_bytes=4,
        persistent_bytes=8,
        memory_limit_bytes=None,
        latency_limit_ms=8.8,
        device_memory_bytes=24 * 10**9,
        lower_bound_bytes=16,
        search=SearchStats(feasible=False, stopped_by_seconds=True),
    )
