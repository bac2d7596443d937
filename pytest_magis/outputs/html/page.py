"""The HTML report: verdicts first, then every case with its plot, peak, plan and history.

`page.html` is the template. Everything except `Markup` is escaped, so names in the report cannot inject HTML.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from magis import __version__
from magis.report import write_text_atomically
from magis.results import ModuleBytes
from magis.strategies.strategy_names import PLANS, RESERVED
from magis.units import format_bytes
from pytest_magis.baseline_files import baseline_path
from pytest_magis.baselines import stored_case
from pytest_magis.explain import module_name, operator_at
from pytest_magis.findings import accept_all, accept_case
from pytest_magis.gate import Run
from pytest_magis.option_values import PERMISSIONS
from pytest_magis.outputs.html.curves import Curves
from pytest_magis.outputs.html.page_parts import Commit, embedded, history, text
from pytest_magis.run_plan import Outcome
from pytest_magis.terminal_table import HEADER, LEFT, cells, state_of_run

ROWS = 20
"""Maximum rows of a table of modules; the others are summed up."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content security policy: the page loads nothing from outside, even if a name injects HTML."""
LARGEST_PICTURE = 4 * 1024 * 1024


def write_report(path: Path, run: Run) -> str:
    """Write the report, and return a line for the terminal. Raises UsageError on failure."""
    resources = {name: (files(__package__) / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}
    commits: dict[Path, tuple[Commit, ...]] = {}
    cases, series, verdicts = [], list[object](), []
    for number, outcome in enumerate(run.outcomes):
        stored = baseline_path(run.settings.baselines, outcome.case.device, outcome.model)
        if stored not in commits:
            commits[stored] = history(stored)
        curves = curves_of(outcome)
        series.append(None if curves is None else curves.data())
        cases.append(case_of_page(number, outcome, run, curves, list(history_rows(outcome, run, commits[stored]))))
        *others, verdict = cells(outcome)
        link = Markup('<a href="#case-{}" class="{}">{}</a>')
        verdicts.append([*others, link.format(number, cases[-1]["state"], Markup(text(verdict)))])  # noqa: S704
    missing = run.planned - len(run.outcomes)
    ended = "The run was interrupted: " if run.interrupted else "The run ended early: " if missing > 0 else ""
    open_ones = [each for each in run.outcomes if each.verdict.needed and not each.verdict.store]
    needed = [kind for kind in PERMISSIONS if any(kind in each.verdict.needed for each in open_ones)]
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_escaped, keep_trailing_newline=True)
    page = environment.from_string((files(__package__) / "page.html").read_text(encoding="utf-8")).render(
        policy=POLICY,
        state=state_of_run(run.outcomes),
        style=Markup(resources["page.css"]),  # noqa: S704
        script=Markup(resources["page.js"]),  # noqa: S704
        data=Markup(embedded({"curves": series})),  # noqa: S704
        ended=ended and f"{ended}{len(run.outcomes)} of {run.planned} cases ran.",
        accept=accept_all(run.settings.given, needed, [each.where for each in open_ones]) if needed else "",
        header=HEADER,
        left=LEFT,
        verdicts=verdicts,
        cases=cases,
        fronts=pictures(run),
        version=__version__,
    )
    write_text_atomically(path, page)
    return f"report: {path}"


def _escaped(value: object) -> Markup:
    """Escape a value for the template, line breaks and control characters included; `Markup` is unchanged."""
    return value if isinstance(value, Markup) else Markup(text(value))  # noqa: S704


def curves_of(outcome: Outcome) -> Curves | None:
    """Return the plot of a case, with one panel for the eager strategy and two for others; None without time lines."""
    result = outcome.result
    if result is None or result.timelines is None:
        return None
    steps = {"original": result.timelines.original}
    if not outcome.case.has_one_step:
        steps["optimized"] = result.timelines.optimized
    # the curves show bytes of tensors, with which a limit of reserved bytes cannot be compared
    return Curves(steps, None if outcome.case.memory_limit_of == RESERVED else result.memory_limit_bytes)


def case_of_page(
    number: int, outcome: Outcome, run: Run, curves: Curves | None, rows: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the template variables of a case: findings, plot, tables of modules, and `rows` of its history."""
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
    picture = None if curves is None else curves.html(number, f"Memory over simulated time of {outcome.name}")
    return {
        "number": number,
        "state": "green" if verdict.passed else "red",
        "outcome": outcome,
        "lines": lines,
        "accept": accept,
        "curves": None if picture is None else Markup(picture),  # noqa: S704
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
