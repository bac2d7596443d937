"""The mutation rules of the F-Tree (paper): each yields named trees, and only ones that keep the rules of ``ftree``.

    enable   a disabled leaf, or the disabled parent of an enabled node without enabled ancestors
    lift     an enabled node without enabled ancestors goes, its parent comes in its place
    disable  an enabled node without enabled descendants
    mutate   the parts of an enabled node to the next larger number that divides the dimension

Leaves and parents are meant along one axis: a candidate of another axis that happens to lie inside would else keep a
node from being enabled, and to lift would change the axis. The paper does not say how many parts a node starts with:
the least that is legal, or, lifted, as many as the node that goes if they divide the parent's dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from magis.paper.ftree import FTree, least_divisor, parts_problems


@dataclass(frozen=True)
class Mutation:
    """A tree and what made it."""

    name: str
    tree: FTree


def enable(tree: FTree) -> Iterator[Mutation]:
    """Trees with one more enabled node."""
    parents = {tree.parent_along(index) for index in _tops(tree)}
    inner = {tree.parent_along(index) for index in range(len(tree.nodes))}
    for index, node in enumerate(tree.nodes):
        if not node.enabled and (index in parents or index not in inner):
            yield from _first(f"enable {index}", tree, index)


def lift(tree: FTree) -> Iterator[Mutation]:
    """Trees with a larger region instead of one of the outermost."""
    for index in _tops(tree):
        parent = tree.parent_along(index)
        if parent < 0:
            continue
        parts = tree.nodes[index].parts
        below = tree.with_parts({index: 1})
        kept = tree.with_parts({index: 1, parent: parts})
        if tree.nodes[parent].extent % parts == 0 and sound(kept):
            yield Mutation(f"lift {index} to {parent}", kept)
        else:
            yield from _first(f"lift {index} to {parent}", below, parent)


def disable(tree: FTree) -> Iterator[Mutation]:
    """Trees with one enabled node less."""
    for index in tree.enabled():
        if not any(tree.nodes[other].enabled for other in tree.descendants(index)):
            yield from _if_sound(f"disable {index}", tree, {index: 1})


def mutate(tree: FTree) -> Iterator[Mutation]:
    """Trees with one node in more parts."""
    for index in tree.enabled():
        yield from _first(f"mutate {index}", tree, index, above=tree.nodes[index].parts)


def mutations(tree: FTree) -> Iterator[Mutation]:
    """Every tree one mutation away."""
    for rule in (enable, lift, disable, mutate):
        yield from rule(tree)


def sound(tree: FTree) -> bool:
    """Whether what is enabled may be enabled together."""
    return not any(parts_problems(tree))


def _tops(tree: FTree) -> list[int]:
    """Enabled nodes without enabled ancestors."""
    return [i for i in tree.enabled() if not any(tree.nodes[other].enabled for other in tree.ancestors(i))]


def _if_sound(name: str, tree: FTree, parts: Mapping[int, int]) -> Iterator[Mutation]:
    changed = tree.with_parts(parts)
    if sound(changed):
        yield Mutation(name, changed)


def _first(name: str, tree: FTree, index: int, above: int = 1) -> Iterator[Mutation]:
    """With the smallest number of parts, larger than ``above``, that keeps the rules; nothing if none does."""
    extent = tree.nodes[index].extent
    while (above := least_divisor(extent, above)) > 1:
        found = list(_if_sound(f"{name}: n = {above}", tree, {index: above}))
        if found:
            yield from found
            return
