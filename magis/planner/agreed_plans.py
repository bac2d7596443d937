"""One plan for all ranks that run the same step: the first of them searches, and none begins before all agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar, cast

import torch.distributed as dist

from magis.errors import MagisError
from magis.graph import Graph, digest, dump, parse, verify
from magis.strategies.rank_step import World

T = TypeVar("T")


class Digested(Protocol):
    """A captured step."""

    @property
    def digest(self) -> str: ...


class OfGraph(Protocol):
    """A plan of it."""

    @property
    def graph(self) -> Graph: ...


S = TypeVar("S", bound=Digested)


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


def all_or_none(what: str, make: Callable[[], T], world: World) -> T:
    """What ``make`` makes on this rank; raises MagisError, the same on all ranks, where it does not on one of them."""
    found = attempt(make)
    told(what, found if isinstance(found, str) else "", "", world)
    return cast("T", found)


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
