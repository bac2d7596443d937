"""Command `magis bisect`: find the revision, or the release of a dependency, at which a case of the gate grew."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from magis.cli.arguments import share, show, tell
from magis.extensions.versions.bisection import bisect

DESCRIPTION = """
Find the revision between GOOD and BAD, or the release of a dependency (torch==2.12.0), at which a case of the gate
began to need more memory. Each version runs the same pytest command in a folder or an environment of its own; the
working tree stays as it is. Exit code 1 where nothing grew.
"""
NOTHING_GREW = 1


def add_bisect(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command `bisect` to the command line."""
    parser = commands.add_parser("bisect", help="the revision at which a case grew", description=DESCRIPTION)
    parser.add_argument("good", metavar="GOOD", help="a revision, or a release such as timm==1.0.20")
    parser.add_argument("bad", metavar="BAD", help="a later one of the same kind")
    parser.add_argument("--case", metavar="NAME", action="append", default=[], help="as in a run's table: net[eager]")
    parser.add_argument("--tolerance", metavar="SHARE", default="0", help="by which a case may grow (default: 0)")
    parser.usage = "magis bisect [-h] [--case NAME] [--tolerance SHARE] GOOD BAD [-- ARGUMENTS OF PYTEST]"
    parser.set_defaults(run=_bisect)


def _bisect(asked: argparse.Namespace) -> int:
    found = bisect(
        asked.good,
        asked.bad,
        start=Path.cwd(),
        arguments=asked.behind,
        cases=asked.case,
        tolerance=share("--tolerance", asked.tolerance),
        say=tell,
    )
    if not found.versions:
        show(f"nothing grew between {asked.good} and {asked.bad} ({found.measurements} measurements)")
        return NOTHING_GREW
    *unknown, last = found.versions
    others = f" or one of {len(unknown)} before it that could not be measured" if unknown else ""
    show(f"memory grew at {last}{others} ({found.measurements} measurements)")
    for each in found.grown:
        show(f"  {each}")
    return 0
