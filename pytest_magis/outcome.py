"""What became of one case, in a form that travels in a test report: between processes, and into JUnit files."""

from __future__ import annotations

import json
from dataclasses import dataclass

from magis.errors import UsageError
from magis.plain_records import from_plain, to_plain
from magis.results import Case, CaseResult
from pytest_magis.verdict import Verdict

PROPERTY = "magis"
"""Name of the report property that holds an outcome."""
FRONT_PROPERTY = "magis-front"
"""Name of the one that says where a front was written."""


@dataclass(frozen=True)
class Outcome:
    """A case that ran: its model's name, its label, and its result, or the error that stood in the way."""

    model: str
    label: str
    case: Case
    verdict: Verdict
    result: CaseResult | None = None
    error: str = ""
    where: str = ""
    """The node id to run it by, of a test of the user's; empty for a case of `--magis-models`."""
    trace: str = ""
    """The file that its time lines were written to."""

    @property
    def name(self) -> str:
        """As in the node id, without "magis::"."""
        return f"{self.model}[{self.label}]"

    def to_text(self) -> str:
        """One line of JSON, floats exact; `from_text` reads it."""
        return json.dumps(to_plain(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Outcome:
        """Raises UsageError for what `to_text` did not write."""
        try:
            return from_plain(cls, json.loads(text), "outcome")
        except (ValueError, UsageError) as error:
            raise UsageError(f"not the outcome of a case: {text[:60]!r}") from error


def leave(outcome: Outcome, properties: list[tuple[str, object]]) -> None:
    """Put an outcome into an item's properties, in the place of that of an earlier run of the item."""
    others = [entry for entry in properties if entry[0] != PROPERTY]
    properties[:] = [*others, (PROPERTY, outcome.to_text())]
