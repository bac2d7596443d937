"""What a run shows on GitHub: its table as Markdown in the job's summary, and red cases as annotations.

The summary is what `--magis-markdown` names, else the file in `$GITHUB_STEP_SUMMARY`, to which every step of a job
adds. Annotations are lines of the log, printed where `$GITHUB_ACTIONS` is "true".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from magis.errors import UsageError
from magis.printable import printable
from magis.report import write_text_atomically
from pytest_magis.findings import accept_case
from pytest_magis.options import Settings
from pytest_magis.run_plan import Outcome
from pytest_magis.terminal_table import HEADER, LEFT, cells


def markdown(outcomes: Sequence[Outcome], given: Sequence[tuple[str, str]]) -> str:
    """The run as Markdown: how many cases are red, the table, and what the red ones say."""
    red = [outcome for outcome in outcomes if not outcome.verdict.passed]
    return "\n".join((*_head(outcomes, red), *_table(outcomes), *_details(red, given))) + "\n"


def _head(outcomes: Sequence[Outcome], red: Sequence[Outcome]) -> Iterator[str]:
    state = f"{len(red)} of {len(outcomes)} cases red" if red else f"all {len(outcomes)} cases green"
    yield f"## magis: {state}"
    yield ""


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield _row(HEADER)
    yield _row(["---" if column in LEFT else "---:" for column in range(len(HEADER))])
    for outcome in outcomes:
        yield _row(cells(outcome))


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(printable(text, 'markdown') for text in texts)} |"


def _details(red: Sequence[Outcome], given: Sequence[tuple[str, str]]) -> Iterator[str]:
    for outcome in red:
        yield ""
        yield f"**{printable(outcome.name, 'markdown')}**"
        yield ""
        for line in _said(outcome):
            yield f"* {printable(line, 'markdown')}"
        if outcome.verdict.needed:
            command = accept_case(given, outcome.model, outcome.case, outcome.verdict.needed, outcome.where)
            yield f"* accept with: `{printable(command).replace('`', '')}`"


def _said(outcome: Outcome) -> Iterator[str]:
    """What a red case says, a line each."""
    if outcome.error:
        yield f"error: {outcome.error}"
    for finding in outcome.verdict.findings:
        yield f"{finding.kind}: {finding.text}"
        if finding.why:
            yield finding.why
    yield from (f"note: {note}" for note in outcome.verdict.notes)


def write_summary(outcomes: Sequence[Outcome], settings: Settings) -> str:
    """Write the run as Markdown where the settings say, and say so in one line. Raises UsageError where that fails."""
    path, text = settings.markdown, markdown(outcomes, settings.given)
    if path is None:
        return ""
    try:
        if settings.adds_markdown:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        else:
            write_text_atomically(path, text)
    except OSError as error:
        raise UsageError(f"cannot write the summary {path}: {error.strerror}") from None
    return f"summary: {path}"


def error_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One workflow command for every red case."""
    for outcome in outcomes:
        if not outcome.verdict.passed:
            text = "\n".join(map(printable, _said(outcome))) or outcome.verdict.label
            yield f"::error title={_property(f'magis::{printable(outcome.name)}')}::{_data(text)}"


def _data(text: str) -> str:
    """As workflow commands want it: https://github.com/actions/toolkit, `escapeData` and `escapeProperty`."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
