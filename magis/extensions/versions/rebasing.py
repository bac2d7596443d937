"""Update of baselines after an upgrade: cases changed by the environment are stored anew, all others are kept.

The code of the working tree is measured twice: in the current environment, and with the releases that the baselines
were stored with. A case that equals its baseline with the old releases, but not with the current ones, was changed by
the environment alone. A case that differs with the old releases was changed by the code, perhaps by both, and is kept,
since a baseline is always one measurement. Differences are those that the gate reports, with tolerances. The compared
results are stored without another measurement, and no file is written before all comparisons are done.

Peaks and latencies are compared with a measurement of the same device and torch. If the baseline has one with the old
releases but none with the current ones, the current measurement of an unchanged case is added.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from magis.child_process import run_captured
from magis.errors import UsageError
from magis.extensions.versions.environments import environment_of, is_requirement, read_version
from magis.extensions.versions.gate_run import GatedCase, run_gate
from magis.extensions.versions.scratch_folders import scratch_folder

STORE = "pytest_magis.store_outcomes"
"""Module of the plugin that stores outcomes as baselines, run with `python -m`."""
NAME_THEM = "name them: magis rebase transformers==5.22.0 -- test_memory.py"


@dataclass(frozen=True)
class RebasedCase:
    """Case that differs from its baseline, could not be compared completely, or is red for another reason."""

    name: str
    is_updated: bool
    """True if the baseline is now the current measurement."""
    is_red: bool
    """True if the gate is still red for the case, or compares only its tensor bytes."""
    text: str

    def __str__(self) -> str:
        return f"{'updated' if self.is_updated else 'left'} {self.name}: {self.text}"


@dataclass(frozen=True)
class Rebased:
    """Result of a rebase."""

    releases: str
    """Releases used for the comparison; "" if no case had changed."""
    looked_at: int
    cases: tuple[RebasedCase, ...]


def rebase(
    requirements: Sequence[str],
    *,
    start: Path,
    arguments: Sequence[str] = (),
    cases: Sequence[str] = (),
    say: Callable[[str], None],
) -> Rebased:
    """Update the baselines of cases that differ in the current environment, but not with other releases.

    `requirements` are these releases ("transformers==5.22.0"); default: the torch release that the baselines name.
    `arguments` are pytest's; `cases` are names as in a run's table ("bert[eager]"); default: all cases. Raises
    UsageError in one line if a comparison is impossible; nothing is written then.
    """
    for text in requirements:
        if not is_requirement(text):
            raise UsageError(f"{text} names no release", hint="write it as for pip: transformers==5.22.0")
    if any(argument.startswith("--magis-update") for argument in arguments):
        raise UsageError("--magis-update: what the environment moved is updated, nothing else", hint="leave it out")
    with scratch_folder() as folder:
        if requirements:  # fails here, before anything is measured, if pip does not find them
            environment_of(requirements, say, folder)
        say("measuring with what is installed")
        run = run_gate("this environment", arguments, folder / "here", start=start, stores=False)
        here = run.read_cases(cases)
        if all(case.is_new for case in here.values()):
            hint = "store them where they hold: pytest --magis-update=new, with the releases of before"
            raise UsageError(f"no baseline is stored of {', '.join(list(here)[:8])}", hint=hint)
        moved = [case for case in here.values() if case.has_moved or _is_uncompared(case)]
        if not moved:
            return Rebased("", len(here), tuple(_judge_cases(here.values(), {}, "")))
        wanted = requirements or stored_with(moved)
        releases = " ".join(wanted)
        python = environment_of(wanted, say, folder)
        say(f"measuring with {releases}")
        run = run_gate(releases, arguments, folder / "there", start=start, python=python, stores=False)
        found = tuple(_judge_cases(here.values(), run.read_cases(), releases))
        updated = {case.name for case in found if case.is_updated}
        _store_baselines([case for case in moved if case.name in updated], folder / "updated")
        return Rebased(releases, len(here), found)


def _judge_cases(here: Iterable[GatedCase], there: Mapping[str, GatedCase], releases: str) -> Iterator[RebasedCase]:
    """Yield the decision on each case that differs from its baseline: updated or kept, with the reason."""
    torch = Version(version("torch")).public
    unmeasured = f"peaks not compared: the baseline has no measurement of this device with torch {torch}"
    for case in here:
        before = there.get(case.name)
        if case.is_new:
            yield RebasedCase(case.name, False, not case.passed, "no baseline is stored")
        elif _is_uncompared(case):
            if before is not None and not before.differs and not before.is_foreign:
                yield RebasedCase(case.name, True, False, f"measured with torch {torch}")
            else:
                why = "there is no such case" if before is None else before.differs or "neither"
                text = f"{unmeasured}; with {releases} {why}; accept with --magis-update=new"
                yield RebasedCase(case.name, False, True, text)
        elif not case.has_moved:
            if not case.passed:
                yield RebasedCase(case.name, False, True, f"red for another reason: {case.differs}")
        elif before is None:
            text = f"{case.differs}; with {releases} there is no such case"
            yield RebasedCase(case.name, False, not case.passed, text)
        elif before.differs and not before.has_moved:
            text = f"{case.differs}; with {releases} there is nothing to compare: {before.differs}"
            yield RebasedCase(case.name, False, not case.passed, text)
        elif before.differs:
            text = f"the code moved it: with {releases} {before.differs}; here {case.differs}"
            yield RebasedCase(case.name, False, not case.passed, text)
        else:
            yield RebasedCase(case.name, True, False, case.differs)


def _is_uncompared(case: GatedCase) -> bool:
    """Return True if only the case's tensor bytes could be compared, and equal the baseline's."""
    return case.is_foreign and case.passed and not case.differs


def stored_with(cases: Iterable[GatedCase]) -> list[str]:
    """Return the torch release with which the baselines of these cases were stored, as a requirement.

    Baselines of simulated devices do not name torch, and none name other packages. Raises UsageError unless they name
    exactly one release, other than the installed one.
    """
    named = re.findall(r"\btorch=([^,\n]+)", "\n".join(place for case in cases for place in case.stored_with))
    found = {release.public for text in named if (release := read_version(text)) is not None}
    if not found:
        raise UsageError("the baselines do not say with which releases they were stored", hint=NAME_THEM)
    here = Version(version("torch")).public
    if here in found:
        raise UsageError(f"the baselines were stored with torch {here}, which is installed", hint=NAME_THEM)
    if len(found) > 1:
        raise UsageError(f"the baselines were stored with torch {' and '.join(sorted(found))}", hint=NAME_THEM)
    return [f"torch=={found.pop()}"]


def _store_baselines(cases: Sequence[GatedCase], file: Path) -> None:
    """Store the current results of these cases as baselines."""
    if not cases:
        return
    file.write_text("".join(f"{json.dumps((case.path, case.outcome))}\n" for case in cases), encoding="utf-8")
    done = run_captured([sys.executable, "-m", STORE, str(file)])
    if done.returncode != 0:
        raise UsageError(" ".join(done.stderr.splitlines()[-1:]).removeprefix("ERROR: "))
