"""Binary search for the version at which a case of the gate grew, over commits or releases of a dependency.

The first version is measured, and every later one is compared with it. The last version is measured only if all before
it are good: n versions take 1 + log2(n) measurements, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from magis.errors import UsageError
from magis.extensions.versions.environments import environment_of, is_requirement, releases
from magis.extensions.versions.gate_run import GateRun, check_cases, run_gate
from magis.extensions.versions.revisions import checkout, commits_between, repository, title
from magis.extensions.versions.scratch_folders import scratch_folder
from magis.report import read_results
from magis.report.results_table import case_name
from magis.units import format_bytes

Say = Callable[[str], None]
RESERVED = "opt reserved bytes (predicted)"
Needs = Mapping[str, int]
"""Bytes by case, of the optimized step if there is one: reserved bytes if the limit counts them, else tensor bytes."""


@dataclass(frozen=True)
class CaseGrowth:
    """Case that needs more memory at a version than at the first version; before and after are bytes."""

    case: str
    before: int
    after: int

    def __str__(self) -> str:
        more = f"+{100 * (self.after / self.before - 1):.1f}%" if self.before else "from nothing"
        return f"{self.case}: {format_bytes(self.before)} -> {format_bytes(self.after)}, {more}"


@dataclass(frozen=True)
class GrowthFound:
    """Result of a bisection."""

    versions: tuple[str, ...]
    """First version that needs more; several if versions between could not be measured; empty if nothing grew."""
    grown: tuple[CaseGrowth, ...]
    measurements: int


def bisect(
    first: str,
    last: str,
    *,
    start: Path,
    arguments: Sequence[str] = (),
    cases: Sequence[str] = (),
    tolerance: float = 0.0,
    say: Say,
) -> GrowthFound:
    """Find the first version after `first`, up to `last`, at which one of the cases needs more memory than at `first`.

    Both are revisions of the repository that contains `start`, or releases ("torch==2.12.0") of one package.
    `arguments` are pytest's; `cases` are names as printed by a run or its results ("bert[magis-mem0.8]", "bert[magis
    mem 0.8]"); default: all cases. `tolerance` is the share by which a case may grow. Raises UsageError in one line for
    versions that cannot be compared.
    """
    if is_requirement(first) != is_requirement(last):
        raise UsageError(f"{first} and {last} are a revision and a release", hint="give two of one kind")
    with scratch_folder() as folder:
        if is_requirement(first):
            names = releases(first, last)

            def run_release(index: int) -> GateRun:
                python = environment_of([names[index]], say, folder)
                return run_gate(names[index], arguments, folder / names[index], start=start, python=python)

            return _search(names, run_release, cases, tolerance, say)

        root = repository(start)
        commits = commits_between(root, first, last)

        def run_commit(index: int) -> GateRun:
            commit = commits[index]
            with checkout(root, commit, folder / "checkout") as tree:
                return run_gate(commit[:10], arguments, folder / commit, start=start, root=root, tree=tree)

        return _search([title(root, commit) for commit in commits], run_commit, cases, tolerance, say)


def _search(
    titles: Sequence[str], run: Callable[[int], GateRun], cases: Sequence[str], tolerance: float, say: Say
) -> GrowthFound:
    say(f"measuring {titles[0]} (1 of at most {1 + math.ceil(math.log2(len(titles)))})")
    needed = needs(run(0), cases)
    grown: dict[int, tuple[CaseGrowth, ...]] = {}
    measured = 1

    def is_bad(index: int) -> bool | None:
        nonlocal measured
        measured += 1
        say(f"measuring {titles[index]}")
        try:
            there = needs(run(index), cases)
            found = tuple(growths(needed, there, tolerance))
            gone = [case for case in needed if case not in there]
            if gone and not found:
                raise UsageError(f"it has no case {gone[0]}")
        except UsageError as error:
            say(f"  left out: {error}")
            return None
        grown[index] = found
        for each in found:
            say(f"  {each}")
        return bool(found)

    suspects = first_bad(len(titles), is_bad)
    if not suspects and len(titles) - 1 not in grown:
        raise UsageError(f"{titles[-1]} could not be measured", hint="name another last version")
    last = suspects[-1] if suspects else None
    return GrowthFound(tuple(titles[index] for index in suspects), () if last is None else grown[last], measured)


def first_bad(count: int, is_bad: Callable[[int], bool | None]) -> list[int]:
    """Return the first bad index of 1 ... count - 1, given that 0 is good and all after a bad one are bad.

    `is_bad` returns None for a version that cannot be judged; its neighbours are then tried, and all candidates for the
    first bad one are returned, of which the last is known to be bad. The list is empty if none is known to be bad.
    """
    good, bad = 0, count  # `count`: none is known to be bad
    unknown: set[int] = set()
    while True:
        middle = (good + bad) // 2
        open_ones = sorted(set(range(good + 1, bad)) - unknown, key=lambda index: (abs(index - middle), index))
        if not open_ones:
            return list(range(good + 1, bad + 1)) if bad < count else []
        answer = is_bad(open_ones[0])
        if answer is None:
            unknown.add(open_ones[0])
        elif answer:
            bad = open_ones[0]
        else:
            good = open_ones[0]


def needs(run: GateRun, cases: Sequence[str]) -> Needs:
    """Return the bytes that each case of a run needs. Raises UsageError for a missing case, or if nothing was gated."""
    run.check_gated()
    frame = read_results(run.csv)
    found: dict[str, int] = {}
    by_run: dict[str, str] = {}  # the run's own names of cases
    rows = frame.astype(object).where(frame.notna(), "").to_dict("records")
    names = [*run.read_cases()] if run.cases.is_file() else [""] * len(rows)  # older versions leave none
    for row, own in zip(rows, names, strict=True):
        name = case_name({str(column): str(cell) for column, cell in row.items()})
        nbytes = row[RESERVED if row.get("memory limit of") == "reserved" else "opt tensor bytes"]
        if nbytes != "":
            found[name], by_run[own] = int(nbytes), name
    wanted = [by_run.get(case, case) for case in cases]
    check_cases(wanted, found)
    return {case: found[case] for case in wanted} if cases else found


def growths(before: Needs, after: Needs, tolerance: float) -> Iterator[CaseGrowth]:
    """Yield the cases that are in both versions and grew by more than the tolerance."""
    for case, nbytes in before.items():
        if after.get(case, 0) > nbytes * (1 + tolerance):
            yield CaseGrowth(case, nbytes, after[case])
