"""Joins a captured step and the optimizer that runs by itself after it into one graph to simulate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from torch import nn

from magis.capture.captured import Captured
from magis.capture.optimizer_rule import Apart, step_behind
from magis.graph import GENERATOR, Graph, Op, Storage, Value
from magis.graph.hazards import lifetimes
from magis.graph.nodes import replace_refs
from magis.ops.optimizers import OwnOptimizer

# The memory of an optimizer that runs by itself after a step: its own code, on tensors without memory.


def followed_by(captured: Captured, own: OwnOptimizer, module: nn.Module, device: str) -> Captured:
    """A step that stops at gradients, as one that `own` updates the weights behind: it holds the optimizer's state, and
    the original is both. Raises CaptureError for a step of the optimizer's that cannot be recorded."""
    parameters = dict(module.named_parameters())
    behind = step_behind(own, {name: parameters[name] for name in captured.graded}, device)
    whole = replace(captured, graph=_with_state(captured.graph, behind), behind=behind)
    return replace(whole, listed=joined(whole, whole.graph, captured.deaths))


def joined(captured: Captured, graph: Graph, deaths: Mapping[int, int] | None = None) -> Captured:
    """The step `graph`, which is captured or a plan of it, with what runs behind it; `deaths` are eager's."""
    behind, lives, end = captured.behind, lifetimes(graph, deaths), len(graph.ops)
    if behind is None:
        return captured
    given = {graph.values[value].name: value for value in graph.inputs}
    returned = graph.outputs[len(graph.outputs) - len(captured.graded) :]
    given |= {f"gradient:{name}": value for name, value in zip(captured.graded, returned, strict=True)}
    join = _Join(graph, behind.graph, given)
    ends = {storage: last + 1 for storage, last in lives.dies.items() if last < end}
    ends |= {join.storages[storage]: end + after for storage, after in behind.deaths.items()}
    numbers = captured.numbers if deaths is not None else ()
    return replace(captured, graph=join.graph(), deaths=ends, numbers=numbers, listed=None)


def before_update(graph: Graph) -> Graph:
    """The operators of forward and backward."""
    return replace(graph, ops=tuple(op for op in graph.ops if op.phase != "update"))


def without_state(graph: Graph) -> Graph:
    """A step that stops at gradients, without the state of what runs behind it."""
    return replace(graph, inputs=tuple(each for each in graph.inputs if not graph.values[each].name.startswith(_STATE)))


_STATE = "state:"


def _named(value: Value) -> str:
    """The name in a step of what an optimizer works on: all but weights and gradients is its state."""
    is_known = value.name.startswith((_STATE, "parameter:", "gradient:"))
    return value.name if is_known or not value.name else f"{_STATE}{value.name}"


def _with_state(graph: Graph, behind: Apart) -> Graph:
    """The step with the tensors that the optimizer keeps among those that stay."""
    tail = behind.graph
    storages, values, inputs = dict(graph.storages), dict(graph.values), list(graph.inputs)
    homes: dict[int, int] = {}
    new_storage, new_value = count(max(storages) + 1), count(max(values) + 1)
    for number in tail.inputs:
        value, storage = tail.values[number], tail.storages[tail.values[number].storage]
        if not storage.persistent or not _named(value).startswith(_STATE):
            continue
        if storage.id not in homes:
            homes[storage.id] = next(new_storage)
            storages[homes[storage.id]] = Storage(homes[storage.id], storage.nbytes, "state")
        inputs.append(next(new_value))
        values[inputs[-1]] = replace(value, id=inputs[-1], storage=homes[storage.id], name=_named(value))
    return replace(graph, storages=storages, values=values, inputs=tuple(inputs))


class _Join:
    """One graph behind another."""

    def __init__(self, first: Graph, tail: Graph, given: Mapping[str, int]) -> None:
        self._first, self._tail = first, tail
        self.storages = {GENERATOR: GENERATOR}
        self._values: dict[int, int] = {}
        for number in tail.inputs:
            known = given.get(_named(tail.values[number]))
            if known is not None:
                self._values[number] = known
                self.storages[tail.values[number].storage] = first.values[known].storage
        next_storage, next_value = max(first.storages) + 1, max(first.values) + 1
        for offset, storage in enumerate(each for each in tail.storages if each not in self.storages):
            self.storages[storage] = next_storage + offset
        known_inputs = {*self._values}
        new = [each for each in tail.values if each not in known_inputs]
        self._values |= {number: next_value + offset for offset, number in enumerate(new)}
        self._new_inputs = [self._values[number] for number in tail.inputs if number not in known_inputs]
        self._versions = {storage: version for op in first.ops for storage, version in op.writes}

    def graph(self) -> Graph:
        """Both."""
        first, tail = self._first, self._tail
        added = {self.storages[s.id]: replace(s, id=self.storages[s.id]) for s in tail.storages.values()}
        made = {self._values[v.id]: self._value(v) for v in tail.values.values()}
        start = max((op.id for op in first.ops), default=-1) + 1
        return replace(
            first,
            storages={**added, **first.storages},
            values={**made, **first.values},
            ops=(*first.ops, *(self._op(op, start) for op in tail.ops)),
            inputs=(*first.inputs, *self._new_inputs),
        )

    def _value(self, value: Value) -> Value:
        return replace(value, id=self._values[value.id], storage=self.storages[value.storage], name=_named(value))

    def _op(self, op: Op, start: int) -> Op:
        return replace(
            op,
            id=start + op.id,
            args=tuple(replace_refs(arg, self._values) for arg in op.args),
            kwargs=tuple((name, replace_refs(arg, self._values)) for name, arg in op.kwargs),
            outputs=tuple(None if value is None else self._values[value] for value in op.outputs),
            reads=self._pinned(op.reads),
            writes=self._pinned(op.writes),
        )

    def _pinned(self, versions: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Storages with their versions behind the first graph."""
        there = ((self.storages[storage], version) for storage, version in versions)
        return tuple((storage, self._versions.get(storage, 0) + version) for storage, version in there)
