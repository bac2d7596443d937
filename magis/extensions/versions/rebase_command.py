"""Command `magis rebase`: update baselines after an upgrade of a dependency."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from magis.cli.arguments import show, tell
from magis.extensions.versions.rebasing import rebase

DESCRIPTION = """
Update the baselines of cases that an upgrade moved: those that are as stored with the releases of before, and differ
with what is installed. Cases that differ in both were moved by the code: they are told and stay as they are. Exit code
1 where a red case is left.
"""
STILL_RED = 1


def add_rebase(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command `rebase` to the command line."""
    parser = commands.add_parser("rebase", help="accept what an upgrade of a dependency moved", description=DESCRIPTION)
    parser.add_argument(
        "requirements",
        metavar="REQUIREMENT",
        nargs="*",
        help="releases that the baselines were stored with: transformers==5.22.0 (default: the torch that they name)",
    )
    parser.add_argument("--case", metavar="NAME", action="append", default=[], help="as in a run's table: net[eager]")
    parser.usage = "magis rebase [-h] [--case NAME] [REQUIREMENT ...] [-- ARGUMENTS OF PYTEST]"
    parser.set_defaults(run=_rebase)


def _rebase(asked: argparse.Namespace) -> int:
    found = rebase(asked.requirements, start=Path.cwd(), arguments=asked.behind, cases=asked.case, say=tell)
    for case in found.cases:
        show(str(case))
    updated, red = sum(case.is_updated for case in found.cases), sum(case.is_red for case in found.cases)
    compared = f", compared with {found.releases}" if found.releases else ", none moved"
    show(f"{found.looked_at} case{'s' if found.looked_at != 1 else ''}{compared}: {updated} updated, {red} still red")
    return STILL_RED if red else 0
