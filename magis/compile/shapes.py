"""Graphs whose sizes dynamo left open: planned for each shape that really comes, since a plan is about bytes.

Dynamo opens a size when it sees a second value of it. The graph then takes that size as an argument; here it is made a
number again, and the graph compiled once for each set of sizes, up to a bound. Beyond it graphs run as they are, in
eager mode.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

__all__ = ["MOST_SHAPES", "Specialized", "is_open"]

MOST_SHAPES = 8
"""Sets of sizes that are planned for one graph; each costs a search."""

Compile: TypeAlias = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Sizes: TypeAlias = tuple[Any, ...]


def is_open(example_inputs: Sequence[Any]) -> bool:
    """Whether a size is not known while the graph is compiled."""
    return any(
        any(not isinstance(size, int) for size in (*item.shape, *item.stride()))
        if isinstance(item, Tensor)
        else isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool))
        for item in example_inputs
    )


class Specialized:
    """A graph with open sizes as a function: compiled when sizes first come."""

    def __init__(self, gm: fx.GraphModule, compile_: Compile) -> None:
        self._gm = gm
        self._compile = compile_
        self._known: dict[Sizes, Callable[..., Any]] = {}
        self._warned = False

    def __call__(self, *args: Any) -> Any:
        sizes = tuple((tuple(arg.shape), arg.stride()) if isinstance(arg, Tensor) else arg for arg in args)
        given = [arg for arg in args if isinstance(arg, Tensor)]
        found = self._known.get(sizes)
        if found is None and len(self._known) < MOST_SHAPES:
            found = self._known[sizes] = self._compile(fixed(self._gm, args), given)
        if found is not None:
            return found(*given)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"magis: a graph has had {MOST_SHAPES} different shapes; further ones run unplanned, in eager mode:"
                " pad batches to fewer shapes",
                stacklevel=2,
            )
        return self._gm(*args)


def fixed(gm: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """The graph with the numbers among its arguments as constants; it takes the tensors alone."""
    graph: fx.Graph = copy.deepcopy(gm.graph)
    for node, arg in zip(graph.find_nodes(op="placeholder"), args, strict=True):
        if isinstance(arg, Tensor):
            continue
        for user in tuple(node.users):
            user.args = fx.map_arg(user.args, partial(_replaced, {node: arg}))
            user.kwargs = fx.map_arg(user.kwargs, partial(_replaced, {node: arg}))
        graph.erase_node(node)
    return fx.GraphModule(gm, graph)


def _replaced(numbers: dict[fx.Node, Any], node: fx.Node) -> Any:
    return numbers.get(node, node)
