"""Stored baselines: the figures of each case when somebody accepted it, as records and pure functions on them.

A file holds one model on one device; `pytest_magis.baseline_files` reads and writes it. In it, a *configuration* is a
preset and a data type, such as "small" (the model's own data type) or "small bfloat16". Tensor bytes hold on every
machine; a step's other figures are kept per device identity, since they hold for that one alone. Each case refers to
the table of workspaces that it was planned with: given to the planner again, it leads to the same plan everywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from magis.results import Case, CaseResult
from pytest_magis.explain import Table, as_table

T = TypeVar("T", bound=Mapping[str, Any])

RATIO_DIGITS = 4  # finer digits of a latency ratio are noise, and would be noise in every diff


@dataclass(frozen=True)
class Measured:
    """Figures of one device identity (of every machine for a simulated device). Bytes; ratios opt/ori.

    Only simulated devices have simulated latencies. Older files lack these and reserved bytes.
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
    """Version of the devices' constants that these latencies were simulated with."""
    original_reserved_bytes: int | None = None
    """Bytes that a GPU's caching allocator is predicted to hold; None on a CPU, and in older files."""
    optimized_reserved_bytes: int | None = None
    optimized_tensor_bytes: int | None = None
    """Bytes of a plan for this device alone, made since the case's misses its limit here; None: the case's holds."""


@dataclass(frozen=True)
class CaseBaseline:
    """Figures that one case is compared with."""

    feasible: bool
    graph: str
    optimized_tensor_bytes: int
    original_tensor_bytes: int
    states_evaluated: int
    workspaces: str | None = None
    """Name of the table that the case was planned with; None if nothing was planned, or without one."""
    original_held: str | None = None
    """Name of the table of tensors that the original holds at its peak; None in older files."""
    optimized_held: str | None = None
    """The same for the optimized step; None for the eager strategy."""
    growth_bytes: int | None = None
    """Accepted growth of memory over the first steps; None: it does not grow."""
    planner: str | None = None
    """Digest of the planner's code; None if nothing was planned, and in older files."""
    step: str | None = None
    """Digest of the step's operators; None in older files."""
    measured: Mapping[str, Measured] = field(kw_only=True)
    """Figures by device identity, as `identity_key` writes it."""


@dataclass(frozen=True)
class Configuration:
    """Cases of one preset and data type.

    With tables that they share, whose names are digests of their content: the planner's workspaces (name -> signature
    -> bytes), and tensors held at peaks (name -> kind -> module -> bytes).
    """

    cases: Mapping[str, CaseBaseline]
    workspaces: Mapping[str, Mapping[str, int]]
    held: Mapping[str, Table] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelBaseline:
    """The content of one file."""

    model: str
    device: str
    configurations: Mapping[str, Configuration]


def configuration_key(case: Case) -> str:
    """Name the configuration of a case: its preset, and its data type if one was asked for."""
    return case.preset if case.dtype is None else f"{case.preset} {case.dtype}"


def case_key(label: str, case: Case) -> str:
    """Name a case in its configuration: its label, and the search's budget, seed and slack unless they are defaults.

    Another budget finds another plan, so it is another case. A cap in seconds is no part of the name: a row that it did
    not stop is the same with it and without.
    """
    budget = "" if case.budget is None else f" budget={case.budget}"
    seed = "" if case.seed == 0 else f" seed={case.seed}"
    slack = f" slack={case.slack:g}" if case.has_limit and case.device != "cpu" and case.slack != Case.slack else ""
    return f"{label}{budget}{seed}{slack}"


def identity_key(result: CaseResult) -> str:
    """Write the device identity of a result in one line.

    A simulated device is the same on every machine, but another operator profile leads to other plans.
    """
    if result.case.device.startswith("sim:"):
        return f"any machine, profile={result.identity['profile']}" if "profile" in result.identity else "any machine"
    return ", ".join(f"{name}={value}" for name, value in sorted(result.identity.items()))


def stored_case(baseline: ModelBaseline | None, label: str, case: Case) -> CaseBaseline | None:
    """Return the baseline of a case; None without one."""
    configuration = baseline.configurations.get(configuration_key(case)) if baseline else None
    return configuration.cases.get(case_key(label, case)) if configuration else None


def planning_inputs(baseline: ModelBaseline | None, label: str, case: Case) -> tuple[dict[str, int] | None, str | None]:
    """Return the stored workspaces (signature -> bytes) and graph digest to plan a case with; (None, None) without any.

    They are the case's own: another case's table lacks the operators that only this case's plan has.
    """
    stored = stored_case(baseline, label, case)
    if baseline is None or stored is None or stored.workspaces is None:
        return None, None
    tables = baseline.configurations[configuration_key(case)].workspaces
    return dict(tables[stored.workspaces]), stored.graph


def updated(baseline: ModelBaseline | None, name: str, label: str, case: Case, result: CaseResult) -> ModelBaseline:
    """Replace a case's entry by one made from a result; `name` is the model's, for a new baseline.

    Figures of other device identities stay as long as the tensor bytes that they belong to are the same.
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
        # a plan of this device alone, of a step that the baseline has other devices' figures of
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
    """Return the stored tables of tensors held at the peaks of a case's original and optimized step; None: unknown."""
    stored = stored_case(baseline, label, case)
    if baseline is None or stored is None:
        return None, None
    tables = baseline.configurations[configuration_key(case)].held
    return tables.get(stored.original_held or ""), tables.get(stored.optimized_held or "")


def lacks_held(result: CaseResult, stored: CaseBaseline | None) -> bool:
    """Return True if a baseline is older than the tables of tensors held at peaks, and the result has one."""
    return stored is not None and stored.original_held is None and result.original.at_peak is not None


def lacks_reserved(result: CaseResult, measured: Measured | None) -> bool:
    """Return True if a baseline is older than reserved bytes, and the result has them."""
    return (
        measured is not None and measured.original_reserved_bytes is None and result.original.reserved_bytes is not None
    )


def _add_table(tables: dict[str, T], table: T | None) -> str | None:
    """Add a table under the digest of its content, and return that; None for None."""
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


def simulated_ns(result: CaseResult) -> tuple[int, int] | None:
    """Return the simulated latencies of original and optimized step, nanoseconds; None but on a simulated device.

    A step that is simulated since it is too large for its device has none: it is gated on the device that it is for.
    """
    if not result.case.device.startswith("sim:"):
        return None
    # results hold milliseconds, which were divided from whole nanoseconds
    return round(result.original.simulated_ms * 1e6), round(result.optimized.simulated_ms * 1e6)


def constants_version(result: CaseResult) -> str | None:
    """Return the version of the constants behind a simulated device's latencies; None on other devices."""
    return result.identity.get("constants") if result.case.device.startswith("sim:") else None


def latency(result: CaseResult) -> tuple[float | None, float | None, float | None]:
    """Return the latency ratio (opt/ori) of a result and the ends of its interval; all None if there is none to gate.

    There is none for a measured row without times, for a ratio in doubt, and for the eager step. A simulated
    ratio is exact: its interval is a point.
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
    """Round a ratio for storage; None for an end of an interval that too few pairs leave open (infinite)."""
    return None if ratio is None or not math.isfinite(ratio) else round(ratio, RATIO_DIGITS)
