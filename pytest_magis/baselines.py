"""Stored baselines: what each case measured when somebody accepted it, as records and pure functions on them.

A file holds one model on one device; `pytest_magis.baseline_files` reads and writes it. In it, a *configuration* is a
preset and a data type, such as "small" (the model's own data type) or "small bfloat16". Tensor bytes hold on every
machine; what a step measured besides is kept per device identity, since it holds for that one alone. Each case refers
to the table of workspaces that it was planned with: handed back to the planner, it makes the same plan everywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from magis.results import Case, CaseResult
from pytest_magis.explain import Table, as_table

RATIO_DIGITS = 4  # finer digits of a latency ratio are noise, and would be noise in every diff


@dataclass(frozen=True)
class Measured:
    """What holds for one device identity (for every machine on a simulated device). Bytes; ratios opt/ori.

    Simulated latencies are of simulated devices alone; they and reserved bytes of files written since they are kept.
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
    """What a GPU's caching allocator is predicted to hold; None on a CPU, and in older files."""
    optimized_reserved_bytes: int | None = None
    optimized_tensor_bytes: int | None = None
    """Where the plan is this device's own, since the case's misses its limit here; None: the case's."""


@dataclass(frozen=True)
class CaseBaseline:
    """What one case is compared with."""

    feasible: bool
    graph: str
    optimized_tensor_bytes: int
    original_tensor_bytes: int
    states_evaluated: int
    workspaces: str | None = None
    """Name of the table that the case was planned with; None if nothing was planned, or without one."""
    original_held: str | None = None
    """Name of the table of what the original holds at its peak; None in files that are older than those tables."""
    optimized_held: str | None = None
    """The same of the optimized step; None for the eager strategy."""
    growth_bytes: int | None = None
    """By which the memory of the first steps grows where that was accepted; None: it does not."""
    planner: str | None = None
    """Digest of the code that planned; None if nothing was planned, and in older files."""
    step: str | None = None
    """Digest of the step's operators; None in older files."""
    measured: Mapping[str, Measured] = field(default_factory=dict)
    """By identity, as `identity_key` writes it."""


@dataclass(frozen=True)
class Configuration:
    """The cases of one preset and data type, the planner's workspaces (name -> signature -> bytes), and what steps hold
    at their peak (name -> kind -> module -> bytes).

    Cases mostly share a table; its name is a digest of its content.
    """

    cases: Mapping[str, CaseBaseline] = field(default_factory=dict)
    workspaces: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held: Mapping[str, Table] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelBaseline:
    """The content of one file."""

    model: str
    device: str
    configurations: Mapping[str, Configuration] = field(default_factory=dict)


def configuration_key(case: Case) -> str:
    """Where a case's baseline is kept: its preset, and its data type if one was asked for."""
    return case.preset if case.dtype is None else f"{case.preset} {case.dtype}"


def case_key(label: str, case: Case) -> str:
    """A case's name in its configuration: its label, plus the search's budget, seed and slack where they are not the
    default.

    Another budget finds another plan, so it is another case to compare with. A cap in seconds is not part of the
    name: a row that it did not stop is the same with it and without.
    """
    budget = "" if case.budget is None else f" budget={case.budget}"
    seed = "" if case.seed == 0 else f" seed={case.seed}"
    limited = case.memory_ratio is not None or case.latency_ratio is not None
    slack = f" slack={case.slack:g}" if limited and case.device != "cpu" and case.slack != Case.slack else ""
    return f"{label}{budget}{seed}{slack}"


def identity_key(result: CaseResult) -> str:
    """The device identity that a result holds for, in one line; a simulated device is the same on every machine, but
    other operator profiles make other plans."""
    if result.case.device.startswith("sim:"):
        return f"any machine, profile={result.identity['profile']}" if "profile" in result.identity else "any machine"
    return ", ".join(f"{name}={value}" for name, value in sorted(result.identity.items()))


def stored_case(baseline: ModelBaseline | None, label: str, case: Case) -> CaseBaseline | None:
    """The baseline of a case; None without one."""
    configuration = baseline.configurations.get(configuration_key(case)) if baseline else None
    return configuration.cases.get(case_key(label, case)) if configuration else None


def planning(baseline: ModelBaseline | None, label: str, case: Case) -> tuple[dict[str, int] | None, str | None]:
    """The workspaces (signature -> bytes) and the graph digest to plan a case with; (None, None) without any.

    Only a case's own table will do: another's lacks the operators that this case's plan alone has.
    """
    stored = stored_case(baseline, label, case)
    if baseline is None or stored is None or stored.workspaces is None:
        return None, None
    tables = baseline.configurations[configuration_key(case)].workspaces
    return dict(tables[stored.workspaces]), stored.graph


def updated(baseline: ModelBaseline | None, name: str, label: str, case: Case, result: CaseResult) -> ModelBaseline:
    """`baseline` with the case's entry made from `result`; `name` is the model's name, also of a new baseline.

    Measurements of other identities are kept as long as the tensor bytes that they belong to are the same.
    """
    base = baseline or ModelBaseline(name, case.device)
    config_key, key = configuration_key(case), case_key(label, case)
    configuration = base.configurations.get(config_key, Configuration())
    old = configuration.cases.get(key)
    if old is not None and _is_own_plan(result, old):
        entry = replace(old, measured={**old.measured, identity_key(result): _measured(result)})
        cases = {**configuration.cases, key: entry}
        changed = replace(configuration, cases=cases)
        return replace(base, configurations={**base.configurations, config_key: changed})
    table = _planned_with(result)
    table_name = None if table is None else _digest(table)
    original, optimized = _held(result)
    entry = replace(
        _case_baseline(result, old),
        workspaces=table_name,
        original_held=None if original is None else _digest(original),
        optimized_held=None if optimized is None else _digest(optimized),
    )
    cases = {**configuration.cases, key: entry}
    tables = dict(configuration.workspaces)
    if table is not None and table_name is not None:
        tables[table_name] = table
    used = {stored.workspaces for stored in cases.values()}
    tables = {name: content for name, content in tables.items() if name in used}
    held = {**configuration.held, **{_digest(each): each for each in (original, optimized) if each is not None}}
    named = {name for stored in cases.values() for name in (stored.original_held, stored.optimized_held)}
    held = {name: content for name, content in held.items() if name in named}
    return replace(base, configurations={**base.configurations, config_key: Configuration(cases, tables, held)})


def _is_own_plan(result: CaseResult, old: CaseBaseline) -> bool:
    """Whether the plan is this device's own, of the step of a baseline that other devices measured, too."""
    same = (old.graph, old.original_tensor_bytes) == (result.graph_digest, result.original_memory.tensor_bytes)
    others = set(old.measured) - {identity_key(result)}
    return not result.portable and same and bool(others) and old.feasible == result.search.feasible


def held_before(baseline: ModelBaseline | None, label: str, case: Case) -> tuple[Table | None, Table | None]:
    """What the original and the optimized step of a case held at their peaks when it was stored; None: not known."""
    stored = stored_case(baseline, label, case)
    if baseline is None or stored is None:
        return None, None
    tables = baseline.configurations[configuration_key(case)].held
    return tables.get(stored.original_held or ""), tables.get(stored.optimized_held or "")


def lacks_held(result: CaseResult, stored: CaseBaseline | None) -> bool:
    """Whether a baseline is older than the tables that the result has."""
    return stored is not None and stored.original_held is None and result.original.at_peak is not None


def lacks_reserved(result: CaseResult, measured: Measured | None) -> bool:
    """Whether a baseline is older than the reserved bytes that the result has."""
    return (
        measured is not None and measured.original_reserved_bytes is None and result.original.reserved_bytes is not None
    )


def _held(result: CaseResult) -> tuple[Table | None, Table | None]:
    original, optimized = result.original.at_peak, result.optimized.at_peak
    return (
        None if original is None else as_table(original),
        None if optimized is None or result.case.has_one_step else as_table(optimized),
    )


def _planned_with(result: CaseResult) -> Mapping[str, int] | None:
    """The table that a result was planned with; None where no plan depends on one.

    On cpu an empty table counts, since no scratch here may be some elsewhere; other devices have no measured one.
    """
    limited = result.case.memory_ratio is not None or result.case.latency_ratio is not None
    if result.planning_workspaces or (limited and result.case.device == "cpu"):
        return result.planning_workspaces
    return None


def _digest(table: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]


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
        measured={**others, identity_key(result): _measured(result)},
    )


def _measured(result: CaseResult) -> Measured:
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
        constants=constants(result),
        optimized_tensor_bytes=None if result.portable else result.memory.tensor_bytes,
    )


def simulated_ns(result: CaseResult) -> tuple[int, int] | None:
    """Simulated latencies of the original and the optimized step, nanoseconds; None but on a simulated device.

    Not of a step that is only too large for its device: such a row is gated on the device where it was made.
    """
    if not result.case.device.startswith("sim:"):
        return None
    # results hold milliseconds: the nearest whole number is what they were divided from
    return round(result.original.simulated_ms * 1e6), round(result.optimized.simulated_ms * 1e6)


def constants(result: CaseResult) -> str | None:
    """Version of the constants that a simulated device's latencies come from; None on other devices."""
    return result.identity.get("constants") if result.case.device.startswith("sim:") else None


def latency(result: CaseResult) -> tuple[float | None, float | None, float | None]:
    """Latency ratio (opt/ori) of a result and the ends of its interval; all None where there is none to gate.

    Measured rows that were not timed have none, nor those whose ratio is in doubt, nor the eager step, which would be
    compared with itself. A simulated ratio is exact: its interval is a point.
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
    """None also of an end that too few pairs do not tell."""
    return None if ratio is None or not math.isfinite(ratio) else round(ratio, RATIO_DIGITS)
