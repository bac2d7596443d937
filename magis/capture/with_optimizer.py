"""Joining of a captured step and the optimizer called after it into one graph, to simulate both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from magis.capture.captured import Captured
from magis.capture.optimizer_rule import Apart, step_behind
from magis.graph import GENERATOR, Graph, Op, Value
from magis.graph.hazards import lifetimes
from magis.graph.nodes import with_inputs
from magis.ops.optimizers import OwnOptimizer

# The memory of an optimizer called after a step: its own code runs on hollow tensors.


def followed_by(captured: Captured, own: OwnOptimizer, module: nn.Module, device: str) -> Captured:
    """Return a step that ends with gradients with the state of the optimizer `own`, called after it, as inputs; its
    original is both steps. Raises CaptureError for an optimizer step that cannot be captured."""
    parameters = dict(module.named_parameters())
    behind = step_behind(own, {name: parameters[name] for name in captured.graded}, device)
    # The optimizer's state joins the inputs of the step.
    tail = behind.graph
    inputs = [tail.values[number] for number in tail.inputs]
    kept = [v for v in inputs if tail.storages[v.storage].persistent and _name_in_step(v).startswith(_STATE)]
    state = Graph(
        storages={value.storage: replace(tail.storages[value.storage], kind="state") for value in kept},
        values={value.id: value for value in kept},
        ops=(),
        inputs=tuple(value.id for value in kept),
        outputs=(),
    )
    whole = replace(captured, graph=_behind(captured.graph, state, {})[0], behind=behind)
    return replace(whole, listed=joined(whole, whole.graph, captured.deaths))


def with_eager_optimizer(captured: Captured, whole: Apart | None) -> Captured:
    """Return a step that runs the optimizer's own code for each parameter, its original followed by the `whole`
    optimizer step; None if that could not be captured: the original then updates one parameter after the other."""
    stops = captured.listed
    if stops is None or whole is None:
        return replace(captured, listed=None)
    # Tensors that an optimizer keeps outside of its state are there in every step, and in no figure.
    storages = {n: replace(s, kind="host") if s.kind == "buffer" else s for n, s in whole.graph.storages.items()}
    whole = replace(whole, graph=replace(whole.graph, storages=storages))
    return replace(captured, listed=joined(replace(stops, behind=whole), stops.graph, stops.deaths))


def joined(captured: Captured, graph: Graph, deaths: Mapping[int, int] | None = None) -> Captured:
    """Append the optimizer step to `graph`, the captured step or a plan of it; `deaths` are eager's, None for a
    plan."""
    behind, lives, end = captured.behind, lifetimes(graph, deaths), len(graph.ops)
    if behind is None:
        return captured
    given = {graph.values[value].name: value for value in graph.inputs}
    returned = graph.outputs[len(graph.outputs) - len(captured.graded) :]
    given |= {f"gradient:{name}": value for name, value in zip(captured.graded, returned, strict=True)}
    whole, storages = _behind(graph, behind.graph, given)
    ends = {storage: last + 1 for storage, last in lives.dies.items() if last < end}
    ends |= {storages[storage]: end + after for storage, after in behind.deaths.items()}
    numbers = captured.numbers if deaths is not None else ()
    return replace(captured, graph=whole, deaths=ends, numbers=numbers, listed=None)


def own_tail(captured: Captured, graph: Graph) -> Graph | None:
    """Return the part of a graph, or behind it, that the optimizer's own code runs; None without such."""
    if captured.rule.kind == "own":
        return replace(graph, ops=tuple(op for op in graph.ops if op.phase == "update"))
    return None if captured.behind is None else captured.behind.graph


def before_update(graph: Graph) -> Graph:
    """Return a graph with the operators of forward and backward only."""
    return replace(graph, ops=tuple(op for op in graph.ops if op.phase != "update"))


def without_state(graph: Graph) -> Graph:
    """Return a step that ends with gradients, without the state of the optimizer called after it."""
    return replace(graph, inputs=tuple(each for each in graph.inputs if not graph.values[each].name.startswith(_STATE)))


_STATE = "state:"


def _name_in_step(value: Value) -> str:
    """Return a value's name in the joined graph: all but weights and gradients are optimizer state."""
    is_known = value.name.startswith((_STATE, "parameter:", "gradient:"))
    return value.name if is_known or not value.name else f"{_STATE}{value.name}"


def _behind(first: Graph, tail: Graph, given: Mapping[str, int]) -> tuple[Graph, Mapping[int, int]]:
    """Append a graph to a first one, with inputs `given` by name; return it with the new numbers of the storages."""
    named = {number: given.get(_name_in_step(tail.values[number])) for number in tail.inputs}
    values = {number: known for number, known in named.items() if known is not None}
    storages = {tail.values[number].storage: first.values[known].storage for number, known in values.items()}
    storages[GENERATOR] = GENERATOR
    new_storages = [each for each in tail.storages.values() if each.id not in storages]
    new_values = [each for each in tail.values.values() if each.id not in values]
    storages |= {each.id: max(first.storages) + number for number, each in enumerate(new_storages, 1)}
    values |= {each.id: max(first.values) + number for number, each in enumerate(new_values, 1)}
    versions = {storage: version for op in first.ops for storage, version in op.writes}
    start = max((op.id for op in first.ops), default=-1) + 1

    def pinned(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((storages[storage], versions.get(storages[storage], 0) + version) for storage, version in pairs)

    def moved(op: Op) -> Op:
        return replace(
            with_inputs(op, values),
            id=start + op.id,
            outputs=tuple(None if value is None else values[value] for value in op.outputs),
            reads=pinned(op.reads),
            writes=pinned(op.writes),
        )

    described = [replace(v, id=values[v.id], storage=storages[v.storage], name=_name_in_step(v)) for v in new_values]
    whole = replace(
        first,
        storages=first.storages | {storages[each.id]: replace(each, id=storages[each.id]) for each in new_storages},
        values=first.values | {value.id: value for value in described},
        ops=(*first.ops, *map(moved, tail.ops)),
        inputs=(*first.inputs, *(values[number] for number, known in named.items() if known is None)),
    )
    return whole, storages
