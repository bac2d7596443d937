"""Whether two graphs are the same: up to the ids of their parts and the order of calls that do not depend on another,
or in what they leave behind."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from magis.graph import Graph, Op, Value, dump, replace_refs
from magis.graph.hazards import dependency_graph
from magis.rewrite.rules.merged_weights import Merging, Window
from magis.simulate.simulator import replay
from tests.nets import Built
from tests.oracles import graph_step, history, measured, workspaces
from tests.strategies import topological


def check_training(
    graph: Graph, built: Built, expected: Sequence[Mapping[str, Tensor]], *, rtol: float, atol: float, about: str = ""
) -> None:
    """Steps of the graph leave behind what is expected, loss, weights and state, and take the simulated bytes."""
    for theirs, ours in zip(expected, history(graph_step(graph, built), len(expected)), strict=True):
        assert theirs.keys() == ours.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(
                ours[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{about} {name}: {text}"
            )
    profile = replay(graph, workspaces().of(graph))
    seen = measured(graph_step(graph, built), graph.persistent_bytes())
    assert seen == (profile.peak_bytes, profile.tensor_bytes), about


def canonical(graph: Graph) -> str:
    """A text that is equal for graphs that are the same."""
    keys = _keys(graph)
    dag = dependency_graph(graph)
    order = topological(dag, lambda node: (keys[graph.ops[node].id], node))
    ops = [graph.ops[node] for node in order]
    made = [value for op in ops for value in op.made()]
    values = {old: new for new, old in enumerate(dict.fromkeys((*graph.inputs, *made)))}
    used = dict.fromkeys(graph.values[value].storage for value in values)
    storages = {old: new for new, old in enumerate([*(s for s in graph.storages if s not in used), *used])}
    looks = {values[v]: graph.values[v] for v in values}
    return dump(
        Graph(
            {new: replace(graph.storages[old], id=new) for old, new in storages.items()},
            {new: replace(value, id=new, storage=storages[value.storage]) for new, value in looks.items()},
            tuple(_renamed(op, number, values, storages) for number, op in enumerate(ops)),
            tuple(values[v] for v in graph.inputs),
            tuple(values[v] for v in graph.outputs),
        )
    )


def _renamed(op: Op, number: int, values: dict[int, int], storages: dict[int, int]) -> Op:
    return replace(
        op,
        id=number,
        args=tuple(replace_refs(arg, values) for arg in op.args),
        kwargs=tuple((name, replace_refs(arg, values)) for name, arg in op.kwargs),
        outputs=tuple(None if value is None else values[value] for value in op.outputs),
        reads=tuple(sorted((storages[storage], version) for storage, version in op.reads)),
        writes=tuple(sorted((storages[storage], version) for storage, version in op.writes)),
    )


def _keys(graph: Graph) -> dict[int, str]:
    """A key for every operator: what it computes, all the way from the inputs."""
    known = {value: f"input {number}" for number, value in enumerate(graph.inputs)}
    found = {}
    for op in graph.ops:
        taken = [known[value] for value in op.inputs()]
        numbers = {value: at for at, value in enumerate(dict.fromkeys(op.inputs()))}
        args = [replace_refs(arg, numbers) for arg in (*op.args, *(arg for _, arg in op.kwargs))]
        text = repr((op.target, args, [name for name, _ in op.kwargs], taken, op.phase))
        found[op.id] = hashlib.sha256(text.encode()).hexdigest()
        known |= {value: f"{found[op.id]} {at}" for at, value in enumerate(op.made())}
    # What is made of it tells calls apart that start out the same.
    for op in reversed(graph.ops):
        users = sorted(
            (found[other.id], other.inputs().index(value))
            for other in graph.ops
            for value in op.made()
            if value in other.inputs()
        )
        outputs = [at for at, value in enumerate(graph.outputs) if value in op.made()]
        found[op.id] = hashlib.sha256(repr((found[op.id], users, outputs)).encode()).hexdigest()
    return found


def merge(graph: Graph, values: Sequence[Value], dim: int) -> tuple[Graph, Window] | None:
    """The graph with tensors side by side along ``dim``, and the window that shows them; the very same graph where they
    lie so already, None where they cannot."""
    merging = Merging(graph)
    window = merging.merge(values, dim)
    return None if window is None else (merging.graph(), window)
