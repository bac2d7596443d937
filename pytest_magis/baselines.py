"""Stored baselines: the accepted figures of each case, as records and pure functions on them.

A file holds one model on one device; `pytest_magis.baseline_files` reads and writes it. A *configuration* is a preset
and a data type, such as "small" (the model's own data type) or "small bfloat16". Tensor bytes are the same on every
machine; peaks and latencies are stored per device identity. Each case names the table of workspaces that it was planned
with: the planner makes the same plan from it on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, TypeVar

from magis.results import Case, CaseResult
from magis.units import in_one_word
from pytest_magis.explain import Table, as_table

T = TypeVar("T", bound=Mapping[str, Any])

RATIO_DIGITS = 4  # finer digits of a latency ratio are noise, and would be noise in every diff


@dataclass(frozen=True)
class Measured:
    """Figures of one device identity (for a simulated device, of every machine), in bytes; ratios are opt/ori.

    Simulated latencies are None on real devices; they and reserved bytes are None in older files.
    """

    lower_bound_bytes: int
    optimized_peak_bytes: int
    original_peak_bytes: int
    memory_limit_bytes: int | None = None
    latency_ratio: float | None = None
    latency_ratio_low: float | None = None
    latency_ratio_high: float | None = None
    original_latency_ns: int | None = None
    optimized_latency_ns: int | None = None
    constants: str | None = None
    """Version of the simulated device's constants that the latencies were simulated with."""
    original_reserved_bytes: int | None = None
    """Bytes that a GPU's caching allocator is predicted to reserve; None on a CPU, and in older files."""
    optimized_reserved_bytes: int | None = None
    optimized_tensor_bytes: int | None = None
    """Tensor bytes of a plan made for this device alone because the portable plan misses its limit here; else None."""


@dataclass(frozen=True)
class CaseBaseline:
    """Accepted figures of one case."""

    feasible: bool
    graph: str
    optimized_tensor_bytes: int
    original_tensor_bytes: int
    states_evaluated: int
    workspaces: str | None = None
    """Name of the table of workspaces that the case was planned with; None for a case without a plan or a table."""
    original_held: str | None = None
    """Name of the table of tensors alive at the peak of the original step; None in older files."""
    optimized_held: str | None = None
    """Name of the table of tensors alive at the peak of the optimized step; None for the eager strategy."""
    growth_bytes: int | None = None
    """Accepted growth of memory over the first steps, in bytes; None if memory does not grow."""
    planner: str | None = None
    """Digest of the planner's code; None for a case without a plan, and in older files."""
    step: str | None = None
    """Digest of the step's operators; None in older files."""
    torch: str | None = None
    """Release of torch, such as "2.13.0", that ran the network; None in older files."""
    measured: Mapping[str, Measured] = field(kw_only=True)
    """Figures by device identity, as `identity_key` writes it."""


@dataclass(frozen=True)
class Configuration:
    """Cases of one preset and data type, and the tables that they share.

    A table's name is the digest of its content: workspaces (name -> operator signature -> bytes), and tensors alive at
    peaks (name -> kind -> module -> bytes).
    """

    cases: Mapping[str, CaseBaseline]
    workspaces: Mapping[str, Mapping[str, int]]
    held: Mapping[str, Table] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelBaseline:
    """Content of one baseline file."""

    model: str
    device: str
    configurations: Mapping[str, Configuration]


def configuration_key(case: Case) -> str:
    """Return the key of a case's configuration: its preset, followed by its data type if one was given."""
    return case.preset if case.dtype is None else f"{case.preset} {case.dtype}"


def case_key(label: str, case: Case) -> str:
    """Return the key of a case in its configuration: its label, and what of budget, seed, slack, host limit and
    allocator is not the default.

    Another budget finds another plan, so it is another case. A cap in seconds is not part of the key: a result that the
    cap did not stop is the same without it.
    """
    budget = "" if case.budget is None else f" budget={case.budget}"
    seed = "" if case.seed == 0 else f" seed={case.seed}"
    slack = f" slack={case.slack:g}" if case.has_limit and case.device != "cpu" and case.slack != Case.slack else ""
    host = f" host={in_one_word(case.host_limit)}" if case.has_limit and case.host_limit else ""
    return f"{label}{budget}{seed}{slack}{host}{f' allocator={case.allocator}' if case.allocator else ''}"


def identity_key(result: CaseResult) -> str:
    """Return the device identity of a result as one line.

    A simulated device is the same on every machine, except for its operator profile.
    """
    if result.case.device.startswith("sim:"):
        return f"any machine, profile={result.identity['profile']}" if "profile" in result.identity else "any machine"
    return ", ".join(f"{name}={value}" for name, value in sorted(result.identity.items()))


def stored_case(baseline: ModelBaseline | None, label: str, case: Case) -> CaseBaseline | None:
    """Return the stored baseline of a case; None if there is none."""
    configuration = baseline.configurations.get(configuration_key(case)) if baseline else None
    return configuration.cases.get(case_key(label, case)) if configuration else None


def planning_inputs(baseline: ModelBaseline | None, label: str, case: Case) -> tuple[dict[str, int] | None, str | None]:
    """Return the stored workspaces (operator signature -> bytes) and graph digest to plan a case with, or Nones.

    Each case has its own table: tables of other cases lack the operators of this case's plan.
    """
    stored = stored_case(baseline, label, case)
    if baseline is None or stored is None or stored.workspaces is None:
        return None, None
    tables = baseline.configurations[configuration_key(case)].workspaces
    return dict(tables[stored.workspaces]), stored.graph


def updated(baseline: ModelBaseline | None, name: str, label: str, case: Case, result: CaseResult) -> ModelBaseline:
    """Return the baseline with a case's entry replaced by a result; `name` is the model's, for a new baseline.

    Figures of other device identities are kept while the tensor bytes stay the same.
    """
    base = baseline or ModelBaseline(name, case.device, {})
    config_key, key = configuration_key(case), case_key(label, case)
    configuration = base.configurations.get(config_key, Configuration({}, {}))
    old = configuration.cases.get(key)
    same_step = old is not None and (
        (old.graph, old.original_tensor_bytes) == (result.graph_digest, result.original_memory.tensor_bytes)
    )
    others = set(old.measured) - {identity_key(result)} if old is not None else ()
    if old is not None and not result.portable and same_step and others and old.feasible == result.search.feasible:
        # a plan for this device alone, while the baseline has figures of other devices
        entry = replace(old, measured={**old.measured, identity_key(result): _figures(result)})
        changed = replace(configuration, cases={**configuration.cases, key: entry})
        return replace(base, configurations={**base.configurations, config_key: changed})
    # tables of the new entry, by digest
    # on a CPU an empty table of workspaces counts: operators without scratch here may have some elsewhere
    planned = result.planning_workspaces or (result.case.has_limit and result.case.device == "cpu")
    peaks = (result.original.at_peak, None if result.case.has_one_step else result.optimized.at_peak)
    original, optimized = (None if peak is None else as_table(peak) for peak in peaks)
    workspaces, held = dict(configuration.workspaces), dict(configuration.held)
    entry = replace(
        _case_baseline(result, old),
        workspaces=_add_table(workspaces, result.planning_workspaces if planned else None),
        original_held=_add_table(held, original),
        optimized_held=_add_table(held, optimized),
    )
    cases = {**configuration.cases, key: entry}
    # tables that no case names any more go
    used = {stored.workspaces for stored in cases.values()}
    named = {name for stored in cases.values() for name in (stored.original_held, stored.optimized_held)}
    changed = Configuration(
        cases,
        {name: table for name, table in workspaces.items() if name in used},
        {name: table for name, table in held.items() if name in named},
    )
    return replace(base, configurations={**base.configurations, config_key: changed})


def held_before(baseline: ModelBaseline | None, label: str, case: Case) -> tuple[Table | None, Table | None]:
    """Return the stored tables of tensors alive at the peaks of original and optimized step; None if missing."""
    stored = stored_case(baseline, label, case)
    if baseline is None or stored is None:
        return None, None
    tables = baseline.configurations[configuration_key(case)].held
    return tables.get(stored.original_held or ""), tables.get(stored.optimized_held or "")


def lacks_held(result: CaseResult, stored: CaseBaseline | None) -> bool:
    """Return True if the result has a table of tensors alive at its peak, and the older baseline has none."""
    return stored is not None and stored.original_held is None and result.original.at_peak is not None


def lacks_reserved(result: CaseResult, measured: Measured | None) -> bool:
    """Return True if the result has reserved bytes and the baseline, from an older version, has none."""
    return (
        measured is not None and measured.original_reserved_bytes is None and result.original.reserved_bytes is not None
    )


def _add_table(tables: dict[str, T], table: T | None) -> str | None:
    """Add a table under the digest of its content, and return the digest; None if there is no table."""
    if table is None:
        return None
    name = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]
    tables[name] = table
    return name


def _case_baseline(result: CaseResult, old: CaseBaseline | None) -> CaseBaseline:
    optimized, original = result.memory, result.original_memory
    same_plan = old is not None and (
        (old.feasible, old.optimized_tensor_bytes, old.original_tensor_bytes)
        == (result.search.feasible, optimized.tensor_bytes, original.tensor_bytes)
    )
    others = old.measured if old is not None and same_plan else {}
    return CaseBaseline(
        feasible=result.search.feasible,
        graph=result.graph_digest,
        optimized_tensor_bytes=optimized.tensor_bytes,
        original_tensor_bytes=original.tensor_bytes,
        states_evaluated=result.search.states,
        planner=result.planner or None,
        step=result.step_digest or None,
        torch=torch_release() or None,
        growth_bytes=None if result.growth is None else result.growth.nbytes,
        measured={**others, identity_key(result): _figures(result)},
    )


def _figures(result: CaseResult) -> Measured:
    ratio, low, high = latency(result)
    original_ns, optimized_ns = simulated_ns(result) or (None, None)
    return Measured(
        lower_bound_bytes=result.lower_bound_bytes,
        optimized_peak_bytes=result.memory.peak_bytes,
        original_peak_bytes=result.original_memory.peak_bytes,
        memory_limit_bytes=result.memory_limit_bytes,
        original_reserved_bytes=result.original.reserved_bytes,
        optimized_reserved_bytes=result.optimized.reserved_bytes,
        latency_ratio=_rounded(ratio),
        latency_ratio_low=_rounded(low),
        latency_ratio_high=_rounded(high),
        original_latency_ns=original_ns,
        optimized_latency_ns=optimized_ns,
        constants=constants_version(result),
        optimized_tensor_bytes=None if result.portable else result.memory.tensor_bytes,
    )


def torch_version() -> str:
    """Return the version of the installed torch, which is not loaded; "" if its installation does not say."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def torch_release() -> str:
    """Return the version of the installed torch without what follows a "+", such as "cpu"."""
    return torch_version().partition("+")[0]


def simulated_ns(result: CaseResult) -> tuple[int, int] | None:
    """Return the simulated latencies of the original and the optimized step in nanoseconds; None on a real device.

    A step simulated only because it is too large to run here has none: it is gated on the real device.
    """
    if not result.case.device.startswith("sim:"):
        return None
    # results hold milliseconds, which were divided from whole nanoseconds
    return round(result.original.simulated_ms * 1e6), round(result.optimized.simulated_ms * 1e6)


def constants_version(result: CaseResult) -> str | None:
    """Return the version of a simulated device's constants; None on real devices."""
    return result.identity.get("constants") if result.case.device.startswith("sim:") else None


def latency(result: CaseResult) -> tuple[float | None, float | None, float | None]:
    """Return the latency ratio (opt/ori) of a result and both ends of its interval; all None if it cannot be gated.

    That is so for a step without timings, an unreliable timing, and the eager step. A simulated ratio is exact, so both
    ends equal it.
    """
    if result.case.has_one_step:
        return None, None, None
    if result.ratio is not None:
        return (None, None, None) if result.ratio.doubt else (result.ratio.ratio, result.ratio.low, result.ratio.high)
    simulated = not (result.optimized.is_measured or result.original.is_measured)
    if not simulated or not result.priced or not result.original.simulated_ms > 0:
        return None, None, None
    ratio = result.optimized.simulated_ms / result.original.simulated_ms
    return ratio, ratio, ratio


def _rounded(ratio: float | None) -> float | None:
    """Round a ratio for storage; None for an infinite end of an interval, left open by too few pairs of timings."""
    return None if ratio is None or not math.isfinite(ratio) else round(ratio, RATIO_DIGITS)
