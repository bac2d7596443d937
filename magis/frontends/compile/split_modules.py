"""A planned joint graph as two fx modules, in exactly its order: forward up to the turn, backward behind it.

What the backward takes from before the turn are the forward's further results, which AOTAutograd keeps on autograd's
node. The code that fx makes forgets every tensor after its last use; both modules take their arguments as a list that
they empty, so that nobody else holds what was saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from magis.errors import VerifyError
from magis.frontends.compile.joint_graph import Joint, placeholders
from magis.frontends.compile.joint_plan import turn_of
from magis.graph import Arg, Const, Graph, Op, Ref
from magis.ops.call import constant, resolve
from magis.runtime.swap_streams import GeneratorStates


def rng_save(device: str) -> Tensor:
    """The state of the generator, in memory of numpy's: a tensor, as all that autograd keeps."""
    return torch.from_numpy(GeneratorStates(device).rng_save())


def rng_enter(state: Tensor, device: str) -> Tensor:
    """Put an earlier state back; returns the present one."""
    return torch.from_numpy(GeneratorStates(device).rng_enter(state.numpy()))


def rng_leave(state: Tensor, device: str) -> None:
    """Put back the state in which ``rng_enter`` found the generator."""
    GeneratorStates(device).rng_leave(state.numpy())


_OWN: dict[str, Callable[..., Any]] = {
    "magis.rng_save": rng_save,
    "magis.rng_enter": rng_enter,
    "magis.rng_leave": rng_leave,
}


def halves(joint: fx.GraphModule, captured: Joint, planned: Graph) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward module of a planned joint graph; ``meta["val"]`` of every node as partitioners leave it."""
    primals, tangents = placeholders(joint.graph)
    at = turn_of(planned)
    given = [value for value in planned.ops[at].outputs if value is not None]
    names = dict(zip((*captured.primals, *given), (node.name for node in (*primals, *tangents)), strict=True))
    results = [None if place is None else planned.outputs[place] for place in captured.forward]
    gradients = _gradients(captured, planned)
    saved = crossing(captured, planned)
    mode = _mode(primals)
    forward = _Half(joint, captured, planned, names, mode, {})
    forward.take(captured.primals)
    forward.run(planned.ops[:at])
    backward = _Half(joint, captured, planned, names, mode, {value: forward.fakes[value] for value in saved})
    backward.take((*saved, *given))
    backward.run(planned.ops[at + 1 :])
    return forward.module((*results, *saved)), backward.module(gradients)


def crossing(captured: Joint, planned: Graph) -> tuple[int, ...]:
    """Values that the backward takes from before the turn, in the order in which it first wants them."""
    at = turn_of(planned)
    known = {value for value in planned.ops[at].outputs if value is not None} | set(captured.constants)
    found: dict[int, None] = {}
    for op in planned.ops[at + 1 :]:
        found.update(dict.fromkeys(value for value in op.inputs() if value not in known))
        known.update(op.made())
    gradients = _gradients(captured, planned)
    found.update(dict.fromkeys(value for value in gradients if value is not None and value not in known))
    return tuple(found)


def _gradients(captured: Joint, planned: Graph) -> list[int | None]:
    return [None if place is None else planned.outputs[place] for place in captured.backward]


def _mode(primals: Sequence[fx.Node]) -> FakeTensorMode:
    for node in primals:
        if isinstance(node.meta["val"], FakeTensor):
            return node.meta["val"].fake_mode
    return FakeTensorMode()


class _Half:
    """A graph that is being written, and what its values look like on fake tensors."""

    def __init__(
        self,
        joint: fx.GraphModule,
        captured: Joint,
        planned: Graph,
        names: Mapping[int, str],
        mode: FakeTensorMode,
        fakes: Mapping[int, Any],
    ) -> None:
        self._graph = fx.Graph()
        self._joint = joint
        self._device = captured.device
        self._constants = captured.constants
        self._planned = planned
        self._names = names
        self._mode = mode
        self._nodes: dict[int, fx.Node] = {}
        self.fakes: dict[int, Any] = dict(fakes)

    def take(self, values: Sequence[int]) -> None:
        """Arguments, in order."""
        for value in values:
            node = self._graph.placeholder(self._names.get(value, f"v{value}"))
            if value not in self.fakes:
                self.fakes[value] = self._fake(value)
            self._bind(value, node, self.fakes[value])

    def run(self, ops: Sequence[Op]) -> None:
        """Operators, in order."""
        with torch.no_grad(), self._mode:
            for op in ops:
                self._call(op)

    def module(self, outputs: Sequence[int | None]) -> fx.GraphModule:
        """The module that returns these values."""
        node = self._graph.output(tuple(None if value is None else self._node(value) for value in outputs))
        node.meta["val"] = tuple(None if value is None else self.fakes[value] for value in outputs)
        self._graph.lint()
        return fx.GraphModule(self._joint, self._graph)

    def _call(self, op: Op) -> None:
        own = _OWN.get(op.target)
        function: Any = resolve(op.target) if own is None else own
        args = tuple(self._arg(arg, self._node) for arg in op.args)
        kwargs = {name: self._arg(arg, self._node) for name, arg in op.kwargs}
        if own is not None:
            args = (*args, self._device)
            out: Any = torch.empty(0, dtype=torch.uint8)
        else:
            out = function(
                *(self._arg(arg, self.fakes.__getitem__) for arg in op.args),
                **{name: self._arg(arg, self.fakes.__getitem__) for name, arg in op.kwargs},
            )
        node = self._graph.call_function(function, args, kwargs)
        node.meta["val"] = out
        if op.many:
            for place, value in enumerate(op.outputs):
                if value is not None:
                    self._bind(value, self._graph.call_function(operator.getitem, (node, place)), out[place])
        elif op.outputs and op.outputs[0] is not None:
            self._bind(op.outputs[0], node, out)

    def _bind(self, value: int, node: fx.Node, fake: Any) -> None:
        self._nodes[value] = node
        self.fakes[value] = node.meta["val"] = fake

    def _node(self, value: int) -> fx.Node:
        if value not in self._nodes:
            name = self._constants.get(value)
            if name is None:
                raise VerifyError(f"value {value} is not there on its side of the turn")
            self._bind(value, self._graph.get_attr(name), self._fake(value))
        return self._nodes[value]

    def _arg(self, arg: Arg, look: Callable[[int], Any]) -> Any:
        if isinstance(arg, Ref):
            self._node(arg.value)  # a constant is opened by being asked for
            return look(arg.value)
        if isinstance(arg, Const):
            return constant(arg, self._device)
        return [self._arg(item, look) for item in arg] if isinstance(arg, tuple) else arg

    def _fake(self, value: int) -> Tensor:
        looks = self._planned.values[value]
        with self._mode:
            return torch.empty_strided(
                looks.shape, looks.stride, dtype=getattr(torch, looks.dtype), device=self._device
            )
