"""Sessions in a job with one process per rank (torchrun, srun): rank 0 is the harness, others lend it their ranks."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase

import pytest

from magis.errors import MagisError, UsageError
from magis.ranks import Agents, attached, lead, serve
from magis.strategies.strategy_names import LISTED, family
from pytest_magis.flags import on_command_line
from pytest_magis.options import anywhere
from pytest_magis.run_plan import ALL

AGENTS: pytest.StashKey[Agents] = pytest.StashKey()
"""In the stash of the session's config, where it leads a job of several processes: for its pools of ranks."""


def take_place(config: pytest.Config) -> pytest.ExitCode | None:
    """Do this process's part of the job that it belongs to, if there is one; for `pytest_cmdline_main`.

    With rank 0 the session runs (None), leading the others until its end. With another rank it collects nothing: it
    serves until rank 0 is done, says so in one line and ends well; where rank 0 disappears, as an interrupted session.
    A run without distributed strategies is no part of any job. Raises pytest.UsageError for half an environment.
    """
    try:
        found = attached() if _wants_ranks(config) else None
        if found is None:
            return None
        if found.rank == 0:
            agents = lead(found)
            config.add_cleanup(agents.close)
            config.stash[AGENTS] = agents
            return None
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    who = f"magis: rank {found.rank} of {found.size}"
    try:
        served = serve(found)
    except MagisError as error:
        sys.stdout.write(f"{who} ends: {error}\n")
        return pytest.ExitCode.INTERRUPTED
    sys.stdout.write(f"{who} served rank 0, which ran the tests ({served} commands)\n")
    return pytest.ExitCode.OK


def _wants_ranks(config: pytest.Config) -> bool:
    """Whether this command line asks for a distributed strategy, by its name or a pattern, on a device that has ranks.

    What an ini file asks for is no reason to take a user's own distributed tests for ranks of the gate.
    """
    settings = anywhere(config)
    if on_command_line(config, "strategies") is None or settings.grid.device.startswith("sim:"):
        return False
    names = [
        name
        for text in settings.strategies
        for name in ((text,) if family(text) else (each for each in LISTED if text == ALL or fnmatchcase(each, text)))
    ]
    return any(family(name) == "distributed" for name in names)
