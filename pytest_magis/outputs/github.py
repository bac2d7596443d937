"""Output for GitHub: a Markdown table in the job summary, and red cases as annotations.

The table is written to the file of `--magis-markdown`, else appended to `$GITHUB_STEP_SUMMARY`, which all steps of a
job share. Annotations are lines of the log, printed if `$GITHUB_ACTIONS` is "true".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from magis.errors import UsageError
from magis.printable import printable
from magis.report import write_text_atomically
from pytest_magis.findings import accept_case
from pytest_magis.flags import Settings
from pytest_magis.run_plan import Outcome
from pytest_magis.terminal_table import HEADER, LEFT, cells, state_of_run


def markdown(outcomes: Sequence[Outcome], given: Sequence[tuple[str, str]]) -> str:
    """Return the run as Markdown: the number of red cases, the table, and the findings of red cases."""
    rule = ["---" if column in LEFT else "---:" for column in range(len(HEADER))]
    table = [[printable(text, "markdown") for text in texts] for texts in (HEADER, rule, *map(cells, outcomes))]
    lines = [f"## magis: {state_of_run(outcomes)}", "", *(f"| {' | '.join(texts)} |" for texts in table)]
    for outcome in outcomes:
        if outcome.verdict.passed:
            continue
        lines += ["", f"**{printable(outcome.name, 'markdown')}**", ""]
        lines += [f"* {printable(line, 'markdown')}" for line in _findings(outcome)]
        if outcome.verdict.needed:
            command = accept_case(given, outcome.model, outcome.case, outcome.verdict.needed, outcome.where)
            lines.append(f"* accept with: `{printable(command).replace('`', '')}`")
    return "\n".join(lines) + "\n"


def _findings(outcome: Outcome) -> Iterator[str]:
    """Yield the error, the findings and the notes of a case, one line each."""
    if outcome.error:
        yield f"error: {outcome.error}"
    for finding in outcome.verdict.findings:
        yield f"{finding.kind}: {finding.text}"
        if finding.why:
            yield finding.why
    yield from (f"note: {note}" for note in outcome.verdict.notes)


def write_summary(outcomes: Sequence[Outcome], settings: Settings) -> str:
    """Write the Markdown summary of the run, and return a line for the terminal. Raises UsageError on failure."""
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
    """Yield a GitHub `::error` workflow command for each red case, at the line that made the tensors that grew."""
    for outcome in outcomes:
        if not outcome.verdict.passed:
            text = "\n".join(map(printable, _findings(outcome))) or outcome.verdict.label
            properties = {**_file_and_line(outcome), "title": f"magis::{printable(outcome.name)}"}
            told = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
            yield f"::error {told}::{_data(text)}"


def _file_and_line(outcome: Outcome) -> dict[str, str]:
    """Return the file and the line of the module that grew, else the file of the user's test, as far as they exist.

    GitHub finds files by their paths in the repository.
    """
    lines = (finding.line for finding in outcome.verdict.findings if finding.line)
    name, _, line = next(lines, outcome.where.partition("::")[0]).partition(":")
    path, root = Path.cwd() / name, Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    if not path.is_file() or not path.is_relative_to(root):
        return {}
    return {"file": path.relative_to(root).as_posix()} | ({"line": line} if line else {})


def _data(text: str) -> str:
    """Escape text for a workflow command, as `escapeData` of https://github.com/actions/toolkit does."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape the value of a workflow command's property, as `escapeProperty` of actions/toolkit does."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
