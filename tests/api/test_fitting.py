"""`magis.fit` against a look at every size."""

from __future__ import annotations

from functools import partial

import pytest

from magis.cli.main import main
from magis.errors import CaptureError
from magis.frontends.fitting import Fit, _Sizes, fit
from magis.planner.bench import Bench
from magis.planner.planning import plan
from magis.planner.subject import Subject
from magis.results import Case

STACK, NORMED, TOKENS = (f"tests.api.fit_nets:{name}" for name in ("stack", "normed", "tokens"))
DEVICE = "sim:rtx3090"
MOST = 24


BENCH = Bench()
"""Models at their sizes, captured once for all tests."""
fit_here = partial(fit, device=DEVICE, cache=BENCH)


def at(model: str, size: int, dim: int = 0) -> Subject:
    return _Sizes(BENCH, Case(model, "magis", DEVICE, "paper"), dim, None).subject(size)


def eager_peaks(model: str, most: int, dim: int = 0) -> dict[int, int]:
    """Eager's peak at every size that the model takes."""
    found = {}
    for size in range(1, most + 1):
        try:
            found[size] = at(model, size, dim).original.peak_bytes
        except CaptureError:
            continue
    return found


@pytest.fixture(scope="module")
def peaks() -> dict[int, int]:
    return eager_peaks(STACK, MOST)


@pytest.mark.parametrize("size", [1, 19])
@pytest.mark.parametrize("short", [0, 1])
def test_eager_is_exact(peaks: dict[int, int], size: int, short: int) -> None:
    limit = peaks[size] - short
    found = fit_here(STACK, memory_limit=limit, budget=5, precision=0.5, most=MOST)
    expected = max((each for each, peak in peaks.items() if peak <= limit), default=None)
    assert (found.eager.size if found.eager else None) == expected
    assert found.is_monotone
    if found.eager is not None:
        assert found.eager.peak_bytes == peaks[found.eager.size] <= limit
    if found.magis is not None:
        assert found.magis.peak_bytes <= limit


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_optimized_size_is_that_of_searching_at_every_size(peaks: dict[int, int], every: bool) -> None:
    limit = peaks[8]
    found = fit_here(STACK, memory_limit=limit, budget=100 if every else 20, precision=0.0, most=MOST)
    assert found.magis is not None
    first, last = (1, MOST) if every else (found.magis.size - 1, min(found.magis.size + 1, MOST))
    feasible = []
    for size in range(first, last + 1):
        planned = plan(
            at(STACK, size),
            memory_limit=limit,
            latency_limit_ns=None,
            budget=100 if every else 20,
            seconds=None,
            seed=0,
            stored=None,
        )
        feasible += [size] if planned.feasible else []
    assert feasible == list(range(first, first + len(feasible)))  # else bisection could not promise it
    assert found.eager is not None
    assert found.bound is not None
    assert found.eager.size < found.magis.size == feasible[-1] <= found.bound
    assert found.magis.latency_ratio >= 1.0


def test_a_latency_ratio_takes_some_of_the_gain_back(peaks: dict[int, int]) -> None:
    sizes = []
    for ratio in (None, 1.000001):
        found = fit_here(STACK, memory_limit=peaks[8], budget=20, latency_ratio=ratio, most=MOST)
        assert found.magis is not None
        assert ratio is None or found.magis.latency_ratio <= ratio
        sizes.append(found.magis.size)
    assert sizes[0] >= sizes[1] >= 8


def test_answers_are_measured_where_that_is_asked_for() -> None:
    found = fit(STACK, memory_limit="64 KiB", device="cpu", budget=20, precision=0.5, most=16, run=True)
    assert isinstance(found, Fit)
    for point in (found.eager, found.magis):
        assert point is not None
        assert point.measured_bytes == point.peak_bytes <= found.limit_bytes


@pytest.mark.soak
def test_a_registered_network_is_resized() -> None:
    own = Bench().subject(Case("mlp", "magis", DEVICE, "small")).original.peak_bytes
    found = fit("mlp", memory_limit=own, device=DEVICE, preset="small", budget=10, precision=0.5, most=5000)
    assert found.eager is not None
    assert found.eager.size == 4096


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_with_settings_of_the_allocator_the_limit_is_on_reserved_bytes(allocator: str) -> None:
    eager = {size: at(STACK, size).captured.original for size in (4, 9, 14)}
    reserved = {size: at(STACK, size).reserved_bytes(step, allocator) or 0 for size, step in eager.items()}
    found = fit_here(STACK, memory_limit=reserved[9], allocator=allocator, budget=5, precision=0.5, most=MOST)
    assert found.eager is not None
    assert found.magis is not None
    assert found.allocator == allocator
    assert found.eager.size >= 9
    assert (found.eager.size < 14) == (reserved[14] > reserved[9])
    assert found.eager.peak_bytes < (found.eager.reserved_bytes or 0) <= reserved[9]
    assert found.magis.size >= found.eager.size
    assert (found.magis.reserved_bytes or 0) <= reserved[9]
    on_peak = fit_here(STACK, memory_limit=reserved[9], budget=5, precision=0.5, most=MOST)
    assert on_peak.eager is not None
    assert (on_peak.allocator, on_peak.eager.reserved_bytes) == (None, None)
    assert on_peak.eager.size >= found.eager.size


def test_the_command_names_reserved_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fit", STACK, "--device", DEVICE, "--memory-limit", "rtx4090", "--most", "2", "--budget", "5"]
    assert main([*asked, "--allocator", "expandable_segments:True"]) == 0
    head, names, eager, *_ = capsys.readouterr().out.splitlines()
    assert head.endswith("dimension 0, at most 22.93 GiB reserved with expandable_segments:True")
    assert names.split()[:3] == ["strategy", "size", "reserved"]
    assert eager.split()[1] == "2"
    assert main([*asked, "--allocator", "pinned_use_background_threads:True"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ERROR: allocator: 'pinned_use_background_threads' is not simulated; it has no part in")
