"""Results to judge, and short words for what a verdict must say."""

from __future__ import annotations

from magis.results import Case, CaseResult, Memory, RatioInterval, SearchStats, StepFigures
from pytest_magis.baselines import stored_case, updated
from pytest_magis.findings import PERMISSIONS, Tolerances
from pytest_magis.verdict import Verdict, judge

HERE = {"instruction set": "avx512", "threads": "2"}
ELSEWHERE = {"instruction set": "neon", "threads": "8"}
ALL = frozenset(PERMISSIONS)


def result(
    *,
    ori: tuple[int, int] = (1000, 1100),
    opt: tuple[int, int] = (700, 750),
    ratio: float | None = 1.02,
    half: float = 0.01,
    device: str = "cpu",
    strategy: str = "magis",
    memory_ratio: float | None = 0.8,
    feasible: bool = True,
    stopped: bool = False,
    numbers: str = "bit-identical",
    identity: dict[str, str] | None = None,
    lower_bound: int = 300,
) -> CaseResult:
    """A result whose simulator is exact. `ori` and `opt` are (tensor bytes, peak bytes)."""
    if strategy == "eager":
        opt, memory_ratio, ratio = ori, None, None
    measured = not device.startswith("sim:")

    def step(bytes_: tuple[int, int], milliseconds: float) -> StepFigures:
        memory = Memory(*bytes_)
        return (
            StepFigures(memory, milliseconds, memory, (milliseconds,))
            if measured
            else StepFigures(memory, milliseconds)
        )

    original = step(ori, 10.0)
    return CaseResult(
        case=Case("bert", strategy, device, "small", memory_ratio=memory_ratio),
        dtype="float32",
        identity=HERE if identity is None else identity,
        original=original,
        optimized=original if strategy == "eager" else step(opt, 10.0 * (ratio or 1.0)),
        ratio=RatioInterval(ratio, ratio - half, ratio + half, 15) if measured and ratio is not None else None,
        weight_bytes=100,
        persistent_bytes=200,
        memory_limit_bytes=None if memory_ratio is None else int(memory_ratio * ori[1]),
        latency_limit_ms=None,
        device_memory_bytes=2**30,
        lower_bound_bytes=lower_bound,
        numbers=numbers,
        graph_digest="g1",
        search=SearchStats(states=9, feasible=feasible, stopped_by_seconds=stopped),
    )


def compare(now: CaseResult, before: CaseResult | None, permissions: str = "", **tolerances: float) -> Verdict:
    """The verdict on `now` against a baseline made from `before`."""
    baseline = None if before is None else updated(None, "bert", "label", before.case, before)
    allowed = frozenset(permissions.split(",")) - {""}
    stored = stored_case(baseline, "label", now.case)
    return judge(now, stored, tolerances=Tolerances(**tolerances), permissions=allowed)


def kinds(verdict: Verdict) -> list[str]:
    return [finding.kind for finding in verdict.findings]


def check(verdict: Verdict, label: str, *found: str, passed: bool) -> None:
    assert (verdict.label, tuple(kinds(verdict)), verdict.passed) == (label, found, passed)
    assert all("\n" not in line for line in (*(f.text for f in verdict.findings), *verdict.notes))
