"""The page: verdicts first, then every case with its curve, what it holds at its peak, its plan and its history."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from magis import __version__
from pytest_magis.baseline_files import baseline_path
from pytest_magis.findings import PERMISSIONS, accept_all
from pytest_magis.outcome import Outcome
from pytest_magis.outputs.html.case_section import case_section, lines_of
from pytest_magis.outputs.html.page_parts import Commit, Run, curve_data, element, embedded, history, table, text
from pytest_magis.outputs.terminal import HEADER, LEFT, cells

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched, whatever a name in the report may hold."""
LARGEST_PICTURE = 4 * 1024 * 1024


def html_text(run: Run) -> str:
    """The report as one page of HTML."""
    return "\n".join(_page(run)) + "\n"


def _page(run: Run) -> Iterator[str]:
    red = [outcome for outcome in run.outcomes if not outcome.verdict.passed]
    state = f"{len(red)} of {len(run.outcomes)} cases red" if red else f"all {len(run.outcomes)} cases green"
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
        series.append(_series(outcome))
    yield from _fronts(run)
    yield "</main>"
    yield f"<footer>pytest-magis {text(__version__)}. Bytes and latencies of curves are simulated.</footer>"
    yield f'<script type="application/json" id="data">{embedded({"curves": series})}</script>'
    yield f"<script>{_resource('page.js')}</script></body></html>"


def _resource(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _series(outcome: Outcome) -> dict[str, Any] | None:
    """The data of a case's curve; None where it has none."""
    if outcome.result is None or outcome.result.timelines is None:
        return None
    lines = outcome.result.timelines
    return curve_data(lines_of(outcome, lines.original, lines.optimized))


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
    """The cells of the terminal's table; the last one leads to the case."""
    rows = []
    for number, outcome in enumerate(run.outcomes):
        *others, verdict = cells(outcome)
        state = "green" if outcome.verdict.passed else "red"
        link = element("a", text(verdict), href=f"#case-{number}", class_=state)
        rows.append([*(text(cell) for cell in others), link])
    return table(HEADER, rows, LEFT, id="verdicts")


def _fronts(run: Run) -> Iterator[str]:
    """The pictures that --magis-pareto wrote, as images: what is in an image runs no script."""
    for model, path in run.fronts:
        picture = _picture(path)
        if picture is not None:
            yield f"<section><h2>{text(model)}: memory against latency</h2>"
            yield f'<img alt="{text(f"front of {model}")}" src="data:image/svg+xml;base64,{picture}"/></section>'


def _picture(path: Path) -> str | None:
    try:
        content = path.read_bytes()
    except OSError:  # it was there; the report does without
        return None
    return b64encode(content).decode("ascii") if len(content) <= LARGEST_PICTURE else None
