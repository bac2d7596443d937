"""Batch norms with `momentum=None`, whose running statistics are cumulative averages over all batches.

The weight of a batch, 1 / number of batches, changes at every step, and torch reads the number on the host. In a graph
the weight is a named scalar: `average_3_1` for the first call in a step of the module at index 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from magis.errors import CaptureError
from magis.graph import Graph
from magis.ops.optimizers import sentinel

_NAME = "average"
_COUNTER = "num_batches_tracked"


@dataclass
class _Average:
    path: str
    part: _BatchNorm
    number: int
    """Index in ``named_modules()``."""
    calls: int = 0


@contextmanager
def averages_named(module: nn.Module, sentinels: MutableMapping[float, str]) -> Iterator[Callable[[Graph], None]]:
    """Replace the momentum of batch norms with `momentum=None` by sentinel numbers while a step is recorded.

    `sentinels` (number -> name) gets one entry per call. Yields a function that checks the step's graph: it raises
    CaptureError unless each call adds exactly one to its counter of batches.
    """
    found = tuple(
        _Average(path, part, number)
        for number, (path, part) in enumerate(module.named_modules())
        if isinstance(part, _BatchNorm)
        and part.momentum is None
        and part.training
        and getattr(part, _COUNTER, None) is not None
    )

    def next_share(each: _Average) -> None:
        each.calls += 1
        each.part.momentum = sentinel(0.00390625, len(sentinels))
        sentinels[each.part.momentum] = f"{_NAME}_{each.number}_{each.calls}"

    def check(graph: Graph) -> None:
        storages = {graph.values[value].name: graph.values[value].storage for value in graph.inputs}
        for each in found:
            storage = storages.get(f"buffer:{each.path}{'.' if each.path else ''}{_COUNTER}")
            writes = sum(storage == written for op in graph.ops for written, _ in op.writes)
            if each.calls != writes:
                raise CaptureError(
                    f"{each.path or '(root)'} has momentum None and counts {writes} batches in {each.calls} calls",
                    hint="give it a momentum, or count one batch a call",
                )

    handles = [
        each.part.register_forward_pre_hook(lambda _part, _inputs, each=each: next_share(each)) for each in found
    ]
    try:
        yield check
    finally:
        for each, handle in zip(found, handles, strict=True):
            handle.remove()
            each.part.momentum = None


def shares_of(module: nn.Module, names: tuple[str, ...]) -> dict[str, float]:
    """Return the weights of the next batch in the running averages, by the names of the graph's scalars."""
    parts = [*module.modules()] if names else []
    found = {}
    for name in names:
        number, call = map(int, name.split("_")[1:])
        found[name] = 1.0 / float(int(getattr(parts[number], _COUNTER)) + call)
    return found


def is_share(name: str) -> bool:
    """Return True if the scalar of that name is the weight of a batch in a running average."""
    return name.startswith(f"{_NAME}_")
