"""What the tests run in processes of their own: `python -m tests.ranks.scripts <name>`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from magis.errors import MagisError
from magis.extensions.ranks import Agents, Attachment, RankJob, RankPool, attached, lead, serve
from tests.ranks.processes import SIGN

HERE = "tests.ranks.own_strategies"


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def hang() -> None:
    """Two ranks that start processes and then hang for an hour."""
    with RankPool(2, timeout_s=3600) as pool:
        pool.run(RankJob(f"{HERE}:small_net", f"{HERE}:starts_processes"))


def place_in_job() -> Attachment:
    place = attached()
    if place is None:
        raise SystemExit("not attached")
    return place


def together() -> None:
    """One process of a job: rank 0 runs a job that does well and one that fails, in a pool over all of them."""
    place = place_in_job()
    if place.rank > 0:
        say(f"rank {place.rank} served {serve(place) > 0}")
        return
    with lead(place) as agents:
        with RankPool(place.size, timeout_s=60, agents=agents) as pool:
            reports = pool.run(RankJob(f"{HERE}:small_net", "ddp", rounds=2))
            say(f"reports of {[report.rank for report in reports]}")
            try:
                pool.run(RankJob(f"{HERE}:small_net", f"{HERE}:killed_on_rank_1"))
            except MagisError as error:
                say(error)
            reports = pool.run(RankJob(f"{HERE}:small_net", "zero1", rounds=2, losses=False))
            say(f"again {[report.rank for report in reports]}")
        try:
            RankPool(place.size + 1, agents=agents)
        except MagisError as error:
            say(error)


def hang_together() -> None:
    """The same with ranks that hang, for a process to be killed meanwhile."""
    if (agents := _led()) is not None:
        with agents, RankPool(agents.attachment.size, timeout_s=3600, agents=agents) as pool:
            pool.run(RankJob(f"{HERE}:small_net", f"{HERE}:starts_processes"))


def wait_together() -> None:
    """Rank 0 leads, and does nothing with the others."""
    if (agents := _led()) is not None:
        with agents:
            agents.hosts(agents.attachment.size)
            Path(os.environ[SIGN]).write_text("started", encoding="ascii")
            time.sleep(3600)


def _led() -> Agents | None:
    """The other processes, for rank 0; they say how it ends."""
    place = place_in_job()
    if place.rank == 0:
        return lead(place)
    try:
        serve(place)
    except MagisError as error:
        say(f"rank {place.rank}: {error}")
    return None


if __name__ == "__main__":
    scripts = {"hang": hang, "together": together, "hang_together": hang_together, "wait_together": wait_together}
    scripts[sys.argv[1]]()
