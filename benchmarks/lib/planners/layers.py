"""The layers of a step: the model's blocks, and the stretches of the forward pass between them.

A model whose blocks are not known is cut at narrow waists instead, where a single tensor goes on.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from magis.simulate.problem import Bools, Int32s, Int64s

from .setting import Setting, within

__all__ = ["Layers", "layers"]

MOST_WAISTS = 48
"""Layers of a model whose blocks are not known, about."""


@dataclass(frozen=True, eq=False)
class Layers:
    """Which layer every node belongs to, in the order in which layers begin."""

    of_node: Int32s  # [n]
    count: int

    def of_storages(self, setting: Setting) -> Int32s:
        """[s] the layer that makes it."""
        found: Int32s = self.of_node[setting.problem.producer]
        return found


def layers(setting: Setting) -> Layers:
    """The layers of a step. A backward node of no block belongs to the last layer whose activations it reads."""
    last = int(np.flatnonzero(setting.origins.forward).max(initial=-1))
    names = _named(setting, last) if setting.origins.blocks else _between_waists(setting, last)
    number: dict[str, int] = {}
    of_node = np.zeros(setting.problem.n_nodes, dtype=np.int32)
    for node, name in enumerate(names):
        of_node[node] = number.setdefault(name, len(number))
    current = max(0, len(number) - 1)
    for node in range(last + 1, setting.problem.n_nodes):
        block = _block(setting, node)
        read = setting.problem.inputs(node)
        read = read[setting.saved[read]]
        if block in number:
            current = number[block]
        elif len(read):
            current = int(of_node[setting.problem.producer[read]].max())
        of_node[node] = current
    return Layers(of_node, max(1, len(number)))


def _block(setting: Setting, node: int) -> str:
    """The block that a node stems from; "" of none."""
    path = setting.origins.paths[node]
    return max((block for block in setting.origins.blocks if within(path, block)), key=len, default="")


def _named(setting: Setting, last: int) -> list[str]:
    """The names of the layers of the forward nodes: their block, or the stretch of nodes that are in none."""
    names: list[str] = []
    for block, group in itertools.groupby(range(last + 1), lambda node: _block(setting, node)):
        nodes = list(group)
        names += [block or f" before node {nodes[-1] + 1}"] * len(nodes)
    return names


def _between_waists(setting: Setting, last: int) -> list[str]:
    """The same, cut where one tensor alone goes on in the forward pass (what is below a hundredth of it aside)."""
    problem, gaps = setting.problem, setting.evaluator.gaps
    leave = np.where(setting.saved, gaps.start, gaps.last)
    cuts: list[int] = []
    apart = max(1, (last + 1) // MOST_WAISTS)
    for at in range(last):
        across: Bools = (problem.producer <= at) & (leave > at)
        sizes: Int64s = problem.nbytes[across]
        if len(sizes) and int(sizes.sum()) * 99 < int(sizes.max()) * 100 and at - (cuts[-1] if cuts else -1) >= apart:
            cuts.append(at)
    return [f" {int(np.searchsorted(cuts, node))}" for node in range(last + 1)]
