"""One plan for all ranks that run the same step: the first of them searches, and none begins before all agree."""

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
    """Ranks that make and plan their steps together."""

    world: World

    def all_or_none(self, what: str, make: Callable[[], T]) -> T:
        """Return what ``make`` makes on this rank. Raises MagisError, the same on all ranks, where one fails."""
        found = attempt(make)
        told(what, found if isinstance(found, str) else "", "", self.world)
        return cast("T", found)

    def agreed(self, subject: Callable[[], S], planned: Callable[[S], OfGraph]) -> Graph:
        """Return the first rank's plan of the step that all of them have."""
        return agreed(subject, planned, self.world, group=1)


class Digested(Protocol):
    """A captured step."""

    @property
    def digest(self) -> str: ...


class OfGraph(Protocol):
    """A plan of it."""

    @property
    def graph(self) -> Graph: ...


def agreed(subject: Callable[[], S], planned: Callable[[S], OfGraph], world: World, *, group: int) -> Graph:
    """The plan of the first rank that has this rank's step, which all ranks with that step run.

    Groups of so many ranks, one behind the other, are replicas of each other. Raises MagisError, with the same line on
    all ranks, where one of them captures no step, or another one than its replicas, where a first one finds no plan,
    and where one gets another plan.
    """
    if world.size == 1:
        return planned(subject()).graph
    found = attempt(subject)
    steps = told("step", *((found, "") if isinstance(found, str) else ("", found.digest)), world)
    check_same("step", steps, [rank % group for rank in range(world.size)])
    firsts = [steps.index(each) for each in steps]
    mine = ("", "")
    if firsts[world.rank] == world.rank and not isinstance(found, str):
        best = attempt(partial(planned, found))
        mine = (best, "") if isinstance(best, str) else ("", dump(best.graph))
    texts = told("plan", *mine, world)
    graph = attempt(partial(_read, texts[firsts[world.rank]]))
    plans = told("plan", *((graph, "") if isinstance(graph, str) else ("", digest(graph))), world)
    check_same("plan", plans, firsts)
    if isinstance(graph, str):
        raise MagisError(graph)
    return graph


def attempt(make: Callable[[], T]) -> T | str:
    """What ``make`` makes, or in one line why it does not."""
    try:
        return make()
    except MagisError as error:
        return str(error)


def told(what: str, wrong: str, mine: str, world: World) -> list[str]:
    """What every rank has; raises MagisError, the same on all of them, unless all say that nothing is wrong."""
    found: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(found, (wrong, mine))
    for rank, (each, _) in enumerate(found):
        if each:
            raise MagisError(f"rank {rank} has no {what}: {each}")
    return [each for _, each in found]


def check_same(what: str, found: Sequence[str], firsts: Sequence[int]) -> None:
    """Raise MagisError unless every rank has the same as its first one."""
    others = [rank for rank, each in enumerate(found) if each != found[firsts[rank]]]
    if others:
        raise MagisError(
            f"the {what} of rank {', '.join(map(str, others))} is another one than that of rank {firsts[others[0]]}",
            hint="give all ranks the same network, batch size, versions and options",
        )


def _read(text: str) -> Graph:
    graph = parse(text)
    verify(graph)
    return graph
