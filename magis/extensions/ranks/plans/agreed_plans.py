"""Agreement of ranks on plans: the first rank with a given step searches, and no rank runs before all agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, cast

import torch.distributed as dist

from magis.errors import MagisError
from magis.graph import Graph, digest, dump, parse, verify
from magis.strategies.rank_step import World

T = TypeVar("T")
S = TypeVar("S", bound="Digested")


@dataclass(frozen=True)
class Ranks:
    """Group of all ranks, which build and plan their steps together."""

    world: World

    def all_or_none(self, what: str, make: Callable[[], T]) -> T:
        """Return ``make()`` of this rank. Raises MagisError on all ranks if it fails on one."""
        found = attempt(make)
        tell_all(what, found if isinstance(found, str) else "", "", self.world)
        return cast("T", found)

    def agreed(self, subject: Callable[[], S], planned: Callable[[S], OfGraph]) -> Graph:
        """Return the plan of the first rank, for a step that is equal on all ranks."""
        return agreed(subject, planned, self.world, group=1)


class Digested(Protocol):
    """Captured step with a digest for comparison."""

    @property
    def digest(self) -> str: ...


class OfGraph(Protocol):
    """Plan that holds its graph."""

    @property
    def graph(self) -> Graph: ...


def agreed(subject: Callable[[], S], planned: Callable[[S], OfGraph], world: World, *, group: int) -> Graph:
    """Return the plan made by the first rank whose step equals this rank's step.

    Consecutive groups of ``group`` ranks are replicas of each other. Raises MagisError, with the same message on all
    ranks, if a rank cannot capture its step or captures another step than its replicas, if a search fails, or if a rank
    receives a different plan.
    """
    if world.size == 1:
        return planned(subject()).graph
    found = attempt(subject)
    steps = tell_all("step", *((found, "") if isinstance(found, str) else ("", found.digest)), world)
    check_same("step", steps, [rank % group for rank in range(world.size)])
    firsts = [steps.index(each) for each in steps]
    mine = ("", "")
    if firsts[world.rank] == world.rank and not isinstance(found, str):
        best = attempt(partial(planned, found))
        mine = (best, "") if isinstance(best, str) else ("", dump(best.graph))
    texts = tell_all("plan", *mine, world)
    graph = attempt(partial(_parse_verified, texts[firsts[world.rank]]))
    plans = tell_all("plan", *((graph, "") if isinstance(graph, str) else ("", digest(graph))), world)
    check_same("plan", plans, firsts)
    if isinstance(graph, str):
        raise MagisError(graph)
    return graph


def attempt(make: Callable[[], T]) -> T | str:
    """Return ``make()``, or the message of its MagisError."""
    try:
        return make()
    except MagisError as error:
        return str(error)


def tell_all(what: str, wrong: str, mine: str, world: World) -> list[str]:
    """All-gather ``mine`` and return every rank's value. Raises MagisError on all ranks if one has a ``wrong``."""
    found: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(found, (wrong, mine))
    for rank, (each, _) in enumerate(found):
        if each:
            raise MagisError(f"rank {rank} has no {what}: {each}")
    return [each for _, each in found]


def check_same(what: str, found: Sequence[str], firsts: Sequence[int]) -> None:
    """Raise MagisError unless every rank's entry in ``found`` equals that of the rank given by ``firsts``."""
    others = [rank for rank, each in enumerate(found) if each != found[firsts[rank]]]
    if others:
        raise MagisError(
            f"the {what} of rank {', '.join(map(str, others))} is another one than that of rank {firsts[others[0]]}",
            hint="give all ranks the same network, batch size, versions and options",
        )


def _parse_verified(text: str) -> Graph:
    graph = parse(text)
    verify(graph)
    return graph
