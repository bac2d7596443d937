"""The gate's place in pytest's collection tree: a collector beside the session's paths, and one item per case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import pytest

from magis.errors import MagisError
from pytest_magis.gate import Gate
from pytest_magis.judged_case import judged, lines_of
from pytest_magis.outcome import FRONT_PROPERTY, leave
from pytest_magis.outputs.output_files import write_front
from pytest_magis.outputs.progress import progress_line
from pytest_magis.run_plan import PREFIX, PlannedCase

NAME = PREFIX.removesuffix("::")


class Regression(Exception):  # noqa: N818  (a red case is a finding of the gate, not an error of it)
    """A red case; its text is the lines to show."""


class Suite(pytest.Collector):
    """All cases of the run. Needs no file: it hangs below the session, whatever paths are collected."""

    gate: Gate

    @classmethod
    def build(cls, parent: pytest.Session, gate: Gate) -> Suite:
        # node ids as strings of their own: --lf and xdist find a case again by them
        suite = cls.from_parent(parent, name=NAME, nodeid=NAME)
        suite.gate = gate
        return suite

    def collect(self) -> Iterator[GateItem]:
        for planned in self.gate.cases:
            yield CaseItem.build(self, self.gate, planned)
        directory = self.gate.settings.pareto
        if directory is not None:
            for planned in self.gate.fronts:
                item = FrontItem.build(self, self.gate, planned)
                item.directory = directory
                yield item


class GateItem(pytest.Item):
    """What the gate runs, under its name."""

    gate: Gate
    planned: PlannedCase

    @classmethod
    def build(cls, parent: Suite, gate: Gate, planned: PlannedCase) -> Self:
        item = cls.from_parent(parent, name=planned.name, nodeid=f"{PREFIX}{planned.name}")
        item.gate = gate
        item.planned = planned
        item.add_marker(pytest.mark.magis)
        item.add_marker(pytest.mark.xdist_group(f"magis-{planned.model}"))
        return item

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        """A red case says what, how much, and how to accept it; only a defect shows a traceback."""
        if isinstance(excinfo.value, (Regression, MagisError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **kwargs)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.config.rootpath / NAME, None, self.nodeid


class FrontItem(GateItem):
    """A model's front of memory against latency: writes it, and is red only where that fails."""

    directory: Path

    def runtest(self) -> None:
        line = nullcontext() if self.gate.is_worker else progress_line(self.config, self.planned.name)
        with line as progress:
            if progress is not None:
                progress("searching the front")
            line_of_it = write_front(self.config, self.directory, self.planned)
        self.user_properties[:] = [(FRONT_PROPERTY, line_of_it)]


class CaseItem(GateItem):
    """One case: runs it, compares it with its baseline, and leaves its outcome in the report's properties."""

    def runtest(self) -> None:
        for outcome in judged(self.config, self.gate, self.planned):
            leave(outcome, self.user_properties)
        if not outcome.verdict.passed:
            raise Regression("\n".join(lines_of(outcome, self.gate, self.config)))
