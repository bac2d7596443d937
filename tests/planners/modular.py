"""Made-up networks whose nodes know their modules."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from benchmarks.lib.planners.setting import Origins, Setting
from magis.simulate.problem import Problem
from tests.search.networks import resnet, transformer, unet


def with_modules(problem: Problem, marks: list[int], *, blocks: bool = True) -> Setting:
    """A made-up network's modules: "layers.i" for each of its blocks, whose children hold four operators each."""
    loss = int(problem.producer[np.flatnonzero(problem.to_end)[0]])
    ends = problem.producer[marks]
    paths: list[str] = []
    for node in range(problem.n_nodes):
        block = int(np.searchsorted(ends, node))
        if node > loss:  # belongs to what it reads of the forward pass
            read = [int(problem.producer[s]) for s in problem.inputs(node) if problem.producer[s] <= loss]
            paths.append(paths[max(read)] if read else paths[-1])
        elif block == len(ends):
            paths.append("head")
        else:
            first = int(ends[block - 1]) + 1 if block else 0
            paths.append(f"layers.{block}.{(node - first) // 4}")
    layered = sorted({path.rpartition(".")[0] for path in paths} - {""})
    called = (*layered, *sorted(set(paths)))
    forward = np.arange(problem.n_nodes) <= loss
    random = forward & ~problem.redo_ok
    return Setting(problem, Origins(tuple(paths), forward, random, called, tuple(layered) if blocks else ()))


NETWORKS: dict[str, Callable[[], tuple[Problem, list[int]]]] = {
    "transformer": lambda: transformer(2, batch=4, seq=128, xfer_ns_per_byte=0.04),
    "no link": lambda: transformer(2, batch=4, seq=128, dropout=False),
    "resnet": lambda: resnet((2, 1), xfer_ns_per_byte=0.04),
    "unet": lambda: unet(2, xfer_ns_per_byte=0.04),
}


@functools.cache
def setting(name: str) -> Setting:
    return with_modules(*NETWORKS[name]())
