"""The HTML report: verdicts first, then every case with its steps, peak, plan and history."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from magis.results import ModuleBytes, TensorLives
from magis.strategies.strategy_names import PLANS, RESERVED
from magis.units import format_bytes
from pytest_magis.baseline_files import baseline_path
from pytest_magis.baselines import stored_case
from pytest_magis.explain import module_name, operator_at
from pytest_magis.findings import accept_all, accept_case
from pytest_magis.gate import Run
from pytest_magis.option_values import PERMISSIONS
from pytest_magis.outputs.html.page_parts import Commit, history, text
from pytest_magis.outputs.html.viewer import Views, provenance_of, write_page
from pytest_magis.run_plan import Outcome
from pytest_magis.terminal_table import HEADER, LEFT, cells, state_of_run

ROWS = 20
"""Maximum rows of a table of modules; the others are summed up."""
LARGEST_PICTURE = 4 * 1024 * 1024


def write_report(path: Path, run: Run) -> str:
    """Write the report, and return a line for the terminal. Raises UsageError on failure."""
    commits: dict[Path, tuple[Commit, ...]] = {}
    cases, views, verdicts, peaks = [], Views(), [], dict[object, str]()
    for number, outcome in enumerate(run.outcomes):
        stored = baseline_path(run.settings.baselines, outcome.case.device, outcome.model)
        if stored not in commits:
            commits[stored] = history(stored)
        steps, limit = steps_of(outcome)
        case = case_of_page(number, outcome, run, list(history_rows(outcome, run, commits[stored])))
        case["view"] = views.add(steps, limit) if steps else None
        case["files"] = list(files_of(outcome, path.parent))
        # the peak of eager is that of all cases of a model: its table stands with the first
        case["peaks"] = [(words, _told_once(peaks, words, rows, outcome)) for words, rows in case["peaks"]]
        cases.append(case)
        *others, verdict = cells(outcome)
        link = Markup('<a href="#case-{}" class="{}">{}</a>')
        verdicts.append([*others, link.format(number, cases[-1]["state"], Markup(text(verdict)))])  # noqa: S704
    missing = run.planned - len(run.outcomes)
    ended = "The run was interrupted: " if run.interrupted else "The run ended early: " if missing > 0 else ""
    open_ones = [each for each in run.outcomes if each.verdict.needed and not each.verdict.store]
    needed = [kind for kind in PERMISSIONS if any(kind in each.verdict.needed for each in open_ones)]
    devices = [f"{each.case.device}{_named(each)}" for each in run.outcomes]
    write_page(
        path,
        views,
        state=state_of_run(run.outcomes),
        about=provenance_of(devices, run.command, run.settings.baselines.parent),
        ended=ended and f"{ended}{len(run.outcomes)} of {run.planned} cases ran.",
        accept=accept_all(run.settings.given, needed, [each.where for each in open_ones]) if needed else "",
        header=HEADER,
        left=LEFT,
        verdicts=verdicts,
        cases=cases,
        fronts=list(pictures(run)),
    )
    return f"report: {path}"


def _told_once(known: dict[object, str], words: str, rows: list[list[object]], outcome: Outcome) -> object:
    """Return the rows of a table; where a case before has the same table, a sentence that names that case."""
    key = (outcome.model, words, str(rows))
    name = known.setdefault(key, outcome.name)
    return rows if name == outcome.name else f"As with {name}."


def _named(outcome: Outcome) -> str:
    """Return the name of a real device in parentheses; "" if it is not known."""
    identity = {} if outcome.result is None else outcome.result.identity
    name = identity.get("name", identity.get("instruction set", ""))
    return f" ({name})" if name else ""


def steps_of(outcome: Outcome) -> tuple[dict[str, TensorLives], int | None]:
    """Return the steps of a case by name, one with the eager strategy and two with others, and the memory limit."""
    result = outcome.result
    if result is None or result.timelines is None or result.timelines.original_lives is None:
        return {}, None
    steps = {"original": result.timelines.original_lives}
    if not outcome.case.has_one_step and result.timelines.optimized_lives is not None:
        steps["optimized"] = result.timelines.optimized_lives
    # the curves show bytes of tensors, with which a limit of reserved bytes cannot be compared
    return steps, None if outcome.case.memory_limit_of == RESERVED else result.memory_limit_bytes


def files_of(outcome: Outcome, beside: Path) -> Iterator[tuple[str, str]]:
    """Yield names and links of the files of a case: its trace, and the memory snapshots of its steps."""
    snapshots = {f"snapshot of the {Path(each).stem.rpartition('.')[2]} step": each for each in outcome.snapshots}
    for name, path in ({"trace": outcome.trace} | snapshots).items():
        if path:
            yield name, quote(os.path.relpath(path, beside))


def case_of_page(number: int, outcome: Outcome, run: Run, rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the template variables of a case: findings, tables of modules, and `rows` of its history."""
    verdict, result = outcome.verdict, outcome.result
    lines = [(found.kind, f"{found.kind}: {found.text}", found.why) for found in verdict.findings]
    lines += [("note", note, "") for note in verdict.notes]
    if outcome.error:
        lines.append(("error", f"error: {outcome.error}", ""))
    accept = ""
    if verdict.needed and not verdict.store:
        accept = accept_case(run.settings.given, outcome.model, outcome.case, verdict.needed, outcome.where)
    peaks = []
    steps = {} if result is None else {"original": result.original.at_peak}
    if result is not None and not outcome.case.has_one_step:
        steps["optimized"] = result.optimized.at_peak
    for step, peak in steps.items():
        if peak is not None:
            where = f", at {operator_at(peak)}" if peak.op else ""
            words = f"Tensors at the peak of the {step} step: {format_bytes(peak.tensor_bytes)}{where}"
            if peak.scratch_bytes:
                scratch = f"{peak.scratch_op}{f' of {peak.scratch_module}' if peak.scratch_module else ''}"
                words += f"; where all bytes peak, {format_bytes(peak.scratch_bytes)} of scratch of {scratch}"
            peaks.append((words, module_rows(peak.held)))
    plan, changes = "", list[list[object]]()
    if result is not None and outcome.case.strategy in PLANS:
        stats, bound = result.search, result.latency_ratio_bound
        plan = f"The plan: {stats.recomputed_ops} calls recomputed, {format_bytes(stats.swapped_bytes)} swapped"
        plan += f", {stats.fission}" if stats.fission else ""
        plan += f"; no plan like it takes less than {bound:.3f} times eager's latency" if bound is not None else ""
        changes = module_rows(stats.changes) if stats.changes else []
    return {
        "number": number,
        "state": "green" if verdict.passed else "red",
        "outcome": outcome,
        "lines": lines,
        "accept": accept,
        "peaks": peaks,
        "plan": plan,
        "changes": changes,
        "history": rows,
    }


def module_rows(rows: Sequence[ModuleBytes]) -> list[list[object]]:
    """Return table rows of modules, most bytes first; a last row sums up those above the maximum."""
    total = sum(row.nbytes for row in rows)
    shown, others = rows[:ROWS], rows[ROWS:]
    if others:
        rest = ModuleBytes("", "", sum(row.nbytes for row in others), sum(row.count for row in others))
        shown = [*shown, rest]
    found: list[list[object]] = []
    for row in shown:
        share = f"{row.nbytes / total:.1%}" if total else ""
        found.append([module_name(row.module), row.kind, row.line, row.count, format_bytes(row.nbytes), share])
    if others:
        found[-1][0] = f"{len(others)} others"
    return found


def history_rows(outcome: Outcome, run: Run, commits: Sequence[Commit]) -> Iterator[tuple[str, ...]]:
    """Yield rows of tensor bytes: each commit that changed them, oldest first; the stored baseline; this run."""

    def amounts(original: int, optimized: int) -> tuple[str, str]:
        return f"{original:,} ({format_bytes(original)})", f"{optimized:,} ({format_bytes(optimized)})"

    path = baseline_path(run.settings.baselines, outcome.case.device, outcome.model)
    versions = [(each.date, each.name, each.subject, each.baseline) for each in reversed(commits)]
    before: tuple[str, ...] | None = None
    known = False
    for date, name, subject, baseline in (*versions, ("", "stored", "", run.baselines.get(path))):
        case = stored_case(baseline, outcome.label, outcome.case)
        then = None if case is None else amounts(case.original_tensor_bytes, case.optimized_tensor_bytes)
        if then is not None and (then != before or name == "stored"):
            known = True
            yield date, name, subject, *then
        before = then
    if known and outcome.result is not None:
        result = outcome.result
        yield "", "this run", "", *amounts(result.original_memory.tensor_bytes, result.memory.tensor_bytes)


def pictures(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (model, base64 SVG) for each --magis-pareto picture; shown as an image, it cannot run scripts."""
    for model, path in run.fronts:
        try:
            content = path.read_bytes()
        except OSError:  # removed meanwhile: the report has no picture
            continue
        if len(content) <= LARGEST_PICTURE:
            yield model, b64encode(content).decode("ascii")
