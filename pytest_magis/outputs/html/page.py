"""The HTML page: verdicts first, then every case with its curves, peak, plan and history."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from magis import __version__
from magis.report import write_text_atomically
from magis.results import CaseResult, ModuleBytes, Peak
from magis.strategies.strategy_names import PLANS, RESERVED
from magis.units import format_bytes
from pytest_magis.baseline_files import baseline_path
from pytest_magis.baselines import CaseBaseline, stored_case
from pytest_magis.explain import module_name, operator_at
from pytest_magis.findings import accept_all, accept_case
from pytest_magis.gate import Run
from pytest_magis.option_values import PERMISSIONS
from pytest_magis.outputs.html.curves import Curves
from pytest_magis.outputs.html.page_parts import Commit, element, embedded, history, table, text
from pytest_magis.run_plan import Outcome
from pytest_magis.terminal_table import HEADER, LEFT, cells, state_of_run

ROWS = 20
"""Most rows of a table of modules; the others are summed up."""


def curves_of(outcome: Outcome) -> Curves | None:
    """Return the curves of a case, one of the eager strategy; None without time lines."""
    result = outcome.result
    if result is None or result.timelines is None:
        return None
    steps = {"original": result.timelines.original}
    if not outcome.case.has_one_step:
        steps["optimized"] = result.timelines.optimized
    # the curves show bytes of tensors, with which a limit of reserved bytes cannot be compared
    return Curves(steps, None if outcome.case.memory_limit_of == RESERVED else result.memory_limit_bytes)


def case_section(number: int, outcome: Outcome, run: Run, commits: Sequence[Commit]) -> str:
    """Return the section of a case; ``commits`` changed the file of its baseline, newest first."""
    state = "green" if outcome.verdict.passed else "red"
    return element(
        "section", "".join(_parts(number, outcome, run, commits)), id=f"case-{number}", class_=f"case {state}"
    )


def _parts(number: int, outcome: Outcome, run: Run, commits: Sequence[Commit]) -> Iterator[str]:
    yield f'<h2>{text(outcome.name)} <span class="label">{text(outcome.verdict.label)}</span></h2>'
    yield from _findings(outcome, run)
    result = outcome.result
    if result is None:
        yield "<p>It has no result to show.</p>"
        return
    curves = curves_of(outcome)
    if curves is None:
        yield "<p>Whoever ran this case gave no time lines.</p>"
    else:
        yield curves.html(number, f"Memory over simulated time of {outcome.name}")
    yield '<div class="peaks">'
    yield _peak("original", result.original.at_peak)
    if not outcome.case.has_one_step:
        yield _peak("optimized", result.optimized.at_peak)
    yield "</div>"
    yield from _plan(outcome, result)
    yield from _history(outcome, result, run, commits)


def _findings(outcome: Outcome, run: Run) -> Iterator[str]:
    """Yield findings with their reasons, notes, the error, and the command that accepts the case."""
    verdict = outcome.verdict
    items = [(found.kind, f"{found.kind}: {found.text}", found.why) for found in verdict.findings]
    items += [("note", note, "") for note in verdict.notes]
    if outcome.error:
        items.append(("error", f"error: {outcome.error}", ""))
    if items:
        lines = (
            element("li", text(line) + (element("div", text(why), class_="why") if why else ""), class_=kind)
            for kind, line, why in items
        )
        yield element("ul", "".join(lines))
    if verdict.needed and not verdict.store:
        command = accept_case(run.settings.given, outcome.model, outcome.case, verdict.needed, outcome.where)
        yield f"<p>Accept with: <code>{text(command)}</code></p>"


def _peak(step: str, peak: Peak | None) -> str:
    """Return the table of tensors at a step's peak."""
    if peak is None:
        return ""
    where = f", at {operator_at(peak)}" if peak.op else ""
    words = f"Tensors at the peak of the {step} step: {format_bytes(peak.tensor_bytes)}{where}"
    if peak.scratch_bytes:
        scratch = f"{peak.scratch_op}{f' of {peak.scratch_module}' if peak.scratch_module else ''}"
        words += f"; where all bytes peak, {format_bytes(peak.scratch_bytes)} of scratch of {scratch}"
    return f"<div><h3>{text(words)}</h3>{_modules(peak.held, 'kind', 'tensors')}</div>"


def _plan(outcome: Outcome, result: CaseResult) -> Iterator[str]:
    if outcome.case.strategy not in PLANS:
        return
    stats = result.search
    words = f"The plan: {stats.recomputed_ops} calls recomputed, {format_bytes(stats.swapped_bytes)} swapped"
    bound = result.latency_ratio_bound
    words += f", {stats.fission}" if stats.fission else ""
    words += f"; no plan like it takes less than {bound:.3f} times eager's latency" if bound is not None else ""
    yield f"<h3>{text(words)}</h3>"
    if stats.changes:
        yield _modules(stats.changes, "what", "calls")


def _modules(rows: Sequence[ModuleBytes], kind: str, count: str) -> str:
    """Return a table of rows by module, most bytes first; the last row sums up the rest."""
    total = sum(row.nbytes for row in rows)
    found = [_module(row, total) for row in rows[:ROWS]]
    if len(rows) > ROWS:
        others = rows[ROWS:]
        rest = ModuleBytes("", "", sum(row.nbytes for row in others), sum(row.count for row in others))
        found.append([text(f"{len(others)} others"), *_module(rest, total)[1:]])
    return table(("module", kind, "line", count, "bytes", "share"), found, (0, 1, 2))


def _module(row: ModuleBytes, total: int) -> list[str]:
    share = f"{row.nbytes / total:.1%}" if total else ""
    cells = (module_name(row.module), row.kind, row.line, row.count, format_bytes(row.nbytes), share)
    return [text(cell) for cell in cells]


def _history(outcome: Outcome, result: CaseResult, run: Run, commits: Sequence[Commit]) -> Iterator[str]:
    """Yield the table of stored bytes by commit, and of this run."""
    path = baseline_path(run.settings.baselines, outcome.case.device, outcome.model)
    stored = stored_case(run.baselines.get(path), outcome.label, outcome.case)
    rows: list[tuple[str, ...]] = []
    before: CaseBaseline | None = None
    for commit in reversed(commits):  # oldest first, those that changed the case's bytes
        then = stored_case(commit.baseline, outcome.label, outcome.case)
        if then is not None and (before is None or _bytes(then) != _bytes(before)):
            rows.append((commit.date, commit.name, commit.subject, *_bytes(then)))
        before = then
    if stored is not None:
        rows.append(("", "stored", "", *_bytes(stored)))
    if not rows:
        return
    rows.append(("", "this run", "", *_amounts(result.original_memory.tensor_bytes, result.memory.tensor_bytes)))
    yield "<h3>Tensor bytes over time</h3>"
    cells = ([text(cell) for cell in row] for row in rows)
    yield table(("date", "commit", "subject", "original", "optimized"), cells, (0, 1, 2), class_="history")


def _bytes(stored: CaseBaseline) -> tuple[str, str]:
    return _amounts(stored.original_tensor_bytes, stored.optimized_tensor_bytes)


def _amounts(original: int, optimized: int) -> tuple[str, str]:
    return f"{original:,} ({format_bytes(original)})", f"{optimized:,} ({format_bytes(optimized)})"


POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content security policy: nothing is fetched, whatever a name in the report contains."""
LARGEST_PICTURE = 4 * 1024 * 1024


def write_report(path: Path, run: Run) -> str:
    """Write the report; return a line that says so. Raises UsageError if that fails."""
    write_text_atomically(path, "\n".join(_page(run)) + "\n")
    return f"report: {path}"


def _page(run: Run) -> Iterator[str]:
    state = state_of_run(run.outcomes)
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{text(POLICY)}"/>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield f"<title>magis: {text(state)}</title><style>{_resource('page.css')}</style></head><body>"
    yield f"<header><h1>magis: {text(state)}</h1>"
    yield '<p class="tools"><button type="button" id="theme" hidden="hidden">light or dark</button>'
    yield '<button type="button" id="only-red" hidden="hidden" aria-pressed="false">red cases only</button></p>'
    yield '<p id="status" role="status"></p></header><main>'
    yield from _notices(run)
    yield _verdicts(run)
    series = []
    commits: dict[Path, tuple[Commit, ...]] = {}
    for number, outcome in enumerate(run.outcomes):
        path = baseline_path(run.settings.baselines, outcome.case.device, outcome.model)
        if path not in commits:
            commits[path] = history(path)
        yield case_section(number, outcome, run, commits[path])
        curves = curves_of(outcome)
        series.append(None if curves is None else curves.data())
    yield from _fronts(run)
    yield "</main>"
    yield f"<footer>pytest-magis {text(__version__)}. Bytes and latencies of curves are simulated.</footer>"
    yield f'<script type="application/json" id="data">{embedded({"curves": series})}</script>'
    yield f"<script>{_resource('page.js')}</script></body></html>"


def _resource(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _notices(run: Run) -> Iterator[str]:
    missing = run.planned - len(run.outcomes)
    if run.interrupted or missing > 0:
        why = "The run was interrupted: " if run.interrupted else "The run ended early: "
        yield element("p", text(f"{why}{len(run.outcomes)} of {run.planned} cases ran."), class_="notice")
    open_ones = [each for each in run.outcomes if each.verdict.needed and not each.verdict.store]
    needed = {kind for each in open_ones for kind in each.verdict.needed}
    if needed:
        words = [kind for kind in PERMISSIONS if kind in needed]
        command = accept_all(run.settings.given, words, [each.where for each in open_ones])
        yield f"<p>Accept everything that can be: <code>{text(command)}</code></p>"


def _verdicts(run: Run) -> str:
    """Return the terminal's table; the verdict in it links to the section of the case."""
    rows = []
    for number, outcome in enumerate(run.outcomes):
        *others, verdict = cells(outcome)
        state = "green" if outcome.verdict.passed else "red"
        link = element("a", text(verdict), href=f"#case-{number}", class_=state)
        rows.append([*(text(cell) for cell in others), link])
    return table(HEADER, rows, LEFT, id="verdicts")


def _fronts(run: Run) -> Iterator[str]:
    """Yield the pictures of --magis-pareto as images, in which no script can run."""
    for model, path in run.fronts:
        try:
            content = path.read_bytes()
        except OSError:  # removed meanwhile: the report has no picture
            continue
        if len(content) <= LARGEST_PICTURE:
            picture = b64encode(content).decode("ascii")
            yield f"<section><h2>{text(model)}: memory against latency</h2>"
            alt = text(f"Pareto front of {model}: peak memory against latency")
            image = f'<img alt="{alt}" src="data:image/svg+xml;base64,{picture}"/>'
            yield f'<div class="wide" role="group" tabindex="0" aria-label="{alt}">{image}</div></section>'
