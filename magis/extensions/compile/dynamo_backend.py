"""The backend of `torch.compile(model, backend="magis")`; graphs with dynamic shapes are planned for each shape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._dynamo import disable
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from magis.extensions.compile.compile_options import OptionError, Options, as_options
from magis.extensions.compile.inductor_partitioner import by_inductor, partition
from magis.printable import warn

# Graphs with dynamic sizes are planned for each actual shape, since a plan is about bytes. Dynamo makes a size dynamic
# when it sees a second value; the graph then takes the size as an argument. Here the size becomes a constant again, and
# the graph is compiled once for each set of sizes, up to a maximum; further shapes run in eager mode.

MOST_SHAPES = 8
"""Maximum number of shapes planned for one graph; each costs a search."""

Compile: TypeAlias = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Sizes: TypeAlias = tuple[Any, ...]


def has_open_sizes(example_inputs: Sequence[Any]) -> bool:
    """Return True if a size is dynamic at compile time."""
    return any(
        any(not isinstance(size, int) for size in (*item.shape, *item.stride()))
        if isinstance(item, Tensor)
        else isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool))
        for item in example_inputs
    )


class Specialized:
    """Compiled function of a graph with dynamic sizes: compiles the graph for each set of sizes at the first call."""

    def __init__(self, gm: fx.GraphModule, compile_: Compile) -> None:
        self._gm = gm
        self._compile_fixed = compile_
        self._known: dict[Sizes, Callable[..., Any]] = {}
        self._warned = False

    def __call__(self, *args: Any) -> Any:
        sizes = tuple((tuple(arg.shape), arg.stride()) if isinstance(arg, Tensor) else arg for arg in args)
        given = [arg for arg in args if isinstance(arg, Tensor)]
        found = self._known.get(sizes)
        if found is None and len(self._known) < MOST_SHAPES:
            found = self._known[sizes] = self._compile_fixed(fixed(self._gm, args), given)
        if found is not None:
            return found(*given)
        if not self._warned:
            self._warned = True
            warn(
                f"magis: a graph has had {MOST_SHAPES} different shapes; further ones run unplanned, in eager mode:"
                " pad batches to fewer shapes",
                stacklevel=2,
            )
        return self._gm(*args)


def fixed(gm: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """Return the graph specialized to the numbers among its arguments; only the tensors remain graph inputs."""
    graph: fx.Graph = copy.deepcopy(gm.graph)
    placeholders = zip(graph.find_nodes(op="placeholder"), args, strict=True)
    numbers: dict[fx.Node, Any] = {node: arg for node, arg in placeholders if not isinstance(arg, Tensor)}
    for node in graph.nodes:
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda each: numbers.get(each, each))
    for node in numbers:
        graph.erase_node(node)
    return fx.GraphModule(gm, graph)


def magis(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one dynamo graph to PyTorch's own kernels, in an order and with recomputation that need less memory.

    `options`: one of `memory_ratio` (share of the unplanned peak of forward and backward; default 0.8), `memory_limit`
    (bytes, or "8 GiB") and `latency_ratio`; `budget` (plans) and `seconds` of each search; `report`, a callback that
    receives a `Report` of each graph; `inductor` (bool): inductor generates the code, and saves the values that the
    plan saves; `link` (bytes per second, 0 for none): the host link for swaps, by default the device's. Raises
    UsageError, one line, for any other option; `mode` has no values.
    """
    if mode not in (None, "default"):
        raise OptionError(f"backend magis has no mode {mode!r}", hint="leave it out")
    outside = _graph_break(gm)
    compile_ = partial(_compile, options=replace(as_options(options), outside=outside))
    if outside:
        warn(f"magis: {outside}", stacklevel=2)
    if has_open_sizes(example_inputs):
        return disable(Specialized(gm, compile_), reason="plans for shapes are made outside of dynamo")  # type: ignore[no-any-return]
    return compile_(gm, example_inputs)


def _graph_break(gm: fx.GraphModule) -> str:
    """Return the graph break that ended a graph as a line; "" if the graph is complete."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    where = reason.user_stack[-1] if reason.user_stack else None
    at = "" if where is None else f" at {Path(where.filename).name}:{where.lineno}"
    return f"a graph ends{at}, and what runs from there is not part of its plan, nor counted"


def _compile(gm: fx.GraphModule, inputs: Sequence[Any], *, options: Options) -> Callable[..., Any]:
    """Compile a graph with inductor or with AOTAutograd, as the options say."""
    if options.inductor:
        return by_inductor(gm, inputs, options=options)
    made: Callable[..., Any] = aot_autograd(  # a new one for each graph, since it changes the arguments that it got
        fw_compiler=boxed_nop, partition_fn=partial(partition, options=options), keep_inference_input_mutations=True
    )(gm, inputs)
    return made
