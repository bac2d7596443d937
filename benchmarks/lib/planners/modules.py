"""Modules as PyTorch's selective checkpointing estimates them: what discarding their tensors saves, and costs.

Source: ``torch.distributed._tools.sac_estimator`` (torch 2.13). Views, which are no nodes here, are always recomputed;
random operators of a module all together or none; in-place operators only with the operator whose output they change,
which here holds for what ``rewrite.normalize`` could turn into plain operators: the rest is always stored. The module's
last operator counts no bytes, since its output is stored anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from magis.simulate.problem import Bools

from .setting import Setting, within

__all__ = ["Curve", "Group", "Module", "fitted", "groups_of", "modules"]

Floats = npt.NDArray[np.float64]
SHIFT = 0.01
"""By which the curve's discarded shares are moved up, as theirs are."""


@dataclass(frozen=True)
class Group:
    """Operators of a module that are stored or recomputed together."""

    nodes: tuple[int, ...]
    nbytes: int
    ns: int
    stored: bool
    """They cannot be recomputed."""


@dataclass(frozen=True)
class Curve:
    """Share of the recomputation time over the share of the discarded bytes: the largest of straight lines."""

    slopes: tuple[float, ...]
    intercepts: tuple[float, ...]


@dataclass(frozen=True)
class Module:
    """A module that is called, in the order in which modules end."""

    path: str
    nodes: tuple[int, ...]
    """Of the forward pass."""
    leaf: bool
    groups: tuple[Group, ...]
    curve: Curve
    saved_bytes: int
    """Of activations that stay for the backward pass without checkpointing, the module's output left out."""
    peak: int
    """Bytes at the worst moment of its backward pass, with nothing recomputed; 0: it has none."""
    inside: frozenset[int]
    """Numbers of the modules in it."""

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def ns(self) -> int:
        return sum(group.ns for group in self.groups)


def modules(setting: Setting) -> list[Module]:
    """Every module with forward nodes, those inside before the one around them."""
    found = setting.origins
    forward = np.flatnonzero(found.forward).tolist()
    own = {path: tuple(node for node in forward if within(found.paths[node], path)) for path in {"", *found.called}}
    paths = sorted((path for path in own if own[path]), key=lambda path: (own[path][-1], -_depth(path), path))
    result = []
    for path in paths:
        inside = frozenset(number for number, other in enumerate(paths) if other != path and within(other, path))
        last = own[path][-1]
        groups = groups_of(setting, own[path])
        result.append(
            Module(
                path=path,
                nodes=own[path],
                leaf=not inside,
                groups=groups,
                curve=fitted(groups),
                saved_bytes=_saved_bytes(setting, own[path], last),
                peak=_backward_peak(setting, path),
                inside=inside,
            )
        )
    return result


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def groups_of(setting: Setting, nodes: Sequence[int]) -> tuple[Group, ...]:
    """The operators of a module: one group each, those with random numbers one together."""
    problem, random = setting.problem, setting.origins.random
    nbytes = {node: int(problem.nbytes[problem.outputs(node)].sum()) for node in nodes}
    nbytes[nodes[-1]] = 0
    drawn = [node for node in nodes if random[node]]
    together = [[node] for node in nodes if not random[node]] + ([drawn] if drawn else [])
    return tuple(
        Group(
            tuple(group),
            sum(nbytes[node] for node in group),
            int(problem.node_ns[group].sum()),
            stored=not bool(problem.redo_ok[group].all()),
        )
        for group in sorted(together)
    )


def fitted(groups: Sequence[Group], segments: int = 2) -> Curve:
    """Straight lines through the costs of discarding group after group, most bytes per time first.

    Theirs come from the package pwlf; here it is the best of all breaks at a point of the curve, in least squares.
    """
    total_bytes, total_ns = sum(group.nbytes for group in groups), sum(group.ns for group in groups)
    if total_bytes == 0 or total_ns == 0:
        return Curve((1.0,), (0.0,))
    free = sorted((g for g in groups if not g.stored), key=lambda g: (-g.nbytes / g.ns if g.ns else -np.inf, g.nodes))
    ordered = [*free, *(group for group in groups if group.stored)]
    share = np.concatenate(([0.0], np.cumsum([group.nbytes for group in ordered]))) / total_bytes + SHIFT
    cost = np.concatenate(([0.0], np.cumsum([group.ns for group in ordered]))) / total_ns
    shares, last = np.unique(share[::-1], return_index=True)  # of equal shares the dearest: the last of the curve
    costs = cost[::-1][last]
    x, y = shares[:-1], costs[1:]  # never below the steps of the curve
    if len(x) < 4 or segments < 2:
        return _lines(x, y, ())
    best = min(((_error(x, y, float(at)), float(at)) for at in x[1:-1]), default=(0.0, float(x[0])))
    return _lines(x, y, (best[1],))


def _basis(x: Floats, breaks: tuple[float, ...]) -> Floats:
    return np.stack([np.ones_like(x), x, *(np.maximum(x - at, 0.0) for at in breaks)], axis=1)


def _error(x: Floats, y: Floats, at: float) -> float:
    basis = _basis(x, (at,))
    factors = np.linalg.lstsq(basis, y, rcond=None)[0]
    return float(((basis @ factors - y) ** 2).sum())


def _lines(x: Floats, y: Floats, breaks: tuple[float, ...]) -> Curve:
    """The pieces of the continuous fit with these breaks."""
    if len(x) < 2:
        return Curve((1.0,), (0.0,))
    factors = np.linalg.lstsq(_basis(x, breaks), y, rcond=None)[0].tolist()
    slopes, intercepts = [factors[1]], [factors[0]]
    for bend, at in zip(factors[2:], breaks, strict=True):
        slopes.append(slopes[-1] + bend)
        intercepts.append(intercepts[-1] - bend * at)
    return Curve(tuple(slopes), tuple(intercepts))


def _saved_bytes(setting: Setting, nodes: Sequence[int], last: int) -> int:
    """Bytes of the activations that nodes make, those of the last one left out."""
    made: Bools = setting.saved & np.isin(setting.problem.producer, [node for node in nodes if node != last])
    return int(setting.problem.nbytes[made].sum())


def _backward_peak(setting: Setting, path: str) -> int:
    inside: Bools = np.array([within(name, path) for name in setting.origins.paths], dtype=np.bool_)
    return int(setting.levels[inside & ~setting.origins.forward].max(initial=0))
