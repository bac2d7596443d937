"""Whose the memory of a step is: the module, kind and line of every storage at one moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from magis.analysis.hazards import is_pure_view
from magis.analysis.liveness import lifetimes
from magis.ir import Graph, Op, Ref
from magis.ir.loops import JOIN, REDUCE
from magis.simulate.replay import Workspace, replay, rounded

__all__ = ["Owned", "Owner", "live", "owners"]

KINDS = {"forward": "activation", "backward": "gradient", "update": "update"}
"""What a temporary tensor is called, by the phase of the operator that made it."""


@dataclass(frozen=True)
class Owner:
    """Where a storage comes from."""

    kind: str
    module: str
    line: str = ""


@dataclass(frozen=True)
class Owned:
    """A storage in memory: bytes as the allocator hands them out."""

    owner: Owner
    nbytes: int


def live(
    graph: Graph, at: int, workspace: Workspace, *, deaths: Mapping[int, int] | None = None, rounding: int = 1
) -> Iterator[Owned]:
    """Every storage that is in memory during operator ``at`` (-1: before the first), persistent ones included.

    During a loop there are those of its body at the worst moment of one part, too, as ``replay`` counts them.
    """
    known = owners(graph, at)
    lives = lifetimes(graph, deaths)
    for storage in graph.storages.values():
        here = storage.kind == "temporary" and lives.born.get(storage.id, at + 1) <= at <= lives.dies[storage.id]
        if storage.persistent or here:
            yield Owned(known.get(storage.id, Owner(storage.kind, "")), rounded(storage.nbytes, rounding))
    body = graph.ops[at].body if at >= 0 else None
    if body is not None:
        inner = replay(body.graph, workspace, rounding=rounding)
        worst = inner.tensors.index(inner.tensor_bytes) if inner.tensors else -1
        yield from live(body.graph, worst, workspace, rounding=rounding)


def owners(graph: Graph, at: int) -> dict[int, Owner]:
    """Storage -> owner, as it is during operator ``at``: memory that was taken over belongs to who took it.

    Persistent tensors belong to the module that they are named after.
    """
    found: dict[int, Owner] = {}
    for value in graph.inputs:
        storage = graph.storages[graph.values[value].storage]
        if storage.persistent and storage.id not in found:
            found[storage.id] = _named(storage.kind, graph.values[value].name)
    for op in graph.ops[: at + 1]:
        for value, owner in _made(graph, op, found):
            storage = graph.storages[graph.values[value].storage]
            if not storage.persistent:
                found[storage.id] = owner
    return found


def _named(kind: str, name: str) -> Owner:
    """``parameter:layers.0.weight``, ``state:exp_avg:layers.0.weight``; batches and constants belong to no module."""
    path = name.rpartition(":")[2] if kind in ("parameter", "buffer", "state") else ""
    return Owner(kind, path.rpartition(".")[0])


def _made(graph: Graph, op: Op, known: Mapping[int, Owner]) -> Iterator[tuple[int, Owner]]:
    """The values whose contents an operator makes, with their owner."""
    if op.body is not None:
        inner = op.body.graph
        of_body = dict(zip((*op.inputs(), *op.made()), inner.inputs, strict=True))
        for value in op.made():
            yield value, _merged(inner, of_body[value]) or _own(graph, op)
    elif op.target in ("magis.store", "magis.load"):  # on either side it is the same tensor
        (taken,) = op.inputs()
        owner = known.get(graph.values[taken].storage, _own(graph, op))
        yield from ((value, owner) for value in op.made())
    elif not is_pure_view(graph, op):
        yield from ((value, _own(graph, op)) for value in op.made())


def _merged(body: Graph, whole: int) -> Owner | None:
    """The owner of the parts that a loop puts into one of its results; None where nothing goes into it."""
    for op in body.ops:
        if op.body is not None:
            inner = dict(zip((*op.inputs(), *op.made()), op.body.graph.inputs, strict=True))
            found = _merged(op.body.graph, inner[whole]) if whole in inner else None
            if found is not None:
                return found
        match op.target, op.args:
            case "magis.join" | "magis.reduce", (Ref(into), Ref(part), *_) if into == whole:
                at = next((place for place, each in enumerate(body.ops) if each is op), -1)
                return owners(body, at).get(body.values[part].storage)
    return None


def _own(graph: Graph, op: Op) -> Owner:
    """The owner of what an operator makes; of one of ours, which stem from no module, that of its first reader."""
    if op.target.startswith("magis.") and not op.module and op.target not in (JOIN, REDUCE):
        made = set(op.made())
        reader = next((each for each in graph.ops if made & set(each.inputs()) and each.module), op)
        return Owner(KINDS.get(reader.phase, reader.phase), reader.module, reader.line)
    return Owner(KINDS.get(op.phase, op.phase), op.module, op.line)
