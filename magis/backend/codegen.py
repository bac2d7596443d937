"""A graph as straight-line Python: one line per operator, every tensor forgotten right after its last use.

The source is meant to be read (``generate``), and runs below autograd: the graph holds the gradients already, so
nothing is saved for a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from magis.analysis.liveness import last_uses
from magis.aten.call import constant, resolve
from magis.backend.host import Host
from magis.ir import Arg, Const, Graph, Op, Ref, Scalar

Step: TypeAlias = Callable[[Sequence[Tensor], Mapping[str, float]], tuple[Tensor, ...]]
"""Takes the tensors of ``graph.inputs`` in order and the named scalars; returns those of ``graph.outputs``."""

_OWN = {f"magis.{name}": f"host.{name}" for name in ("store", "load", "wait", "rng_save", "rng_enter", "rng_leave")}
"""Operators of our own: what happens on the host."""


def generate(graph: Graph) -> str:
    """Python source of the step."""
    lines = ["def step(tensors, scalars):"]
    if graph.inputs:
        lines.append(f"    ({', '.join(_name(v) for v in graph.inputs)},) = tensors")
    names = sorted({scalar for op in graph.ops for scalar in _scalars((op.args, tuple(a for _, a in op.kwargs)))})
    lines.extend(f"    {name} = scalars[{name!r}]" for name in names)
    module = None
    for op, forget in zip(graph.ops, last_uses(graph), strict=True):
        where = " ".join(f"{op.phase} {op.module}".split())  # one line, whatever a module is called
        if where != module:
            lines.append(f"    # {where}")
            module = where
        lines.append(f"    {_call(op)}")
        if forget:
            lines.append(f"    del {', '.join(_name(value) for value in forget)}")
    lines.append(f"    return ({', '.join(_name(v) for v in graph.outputs)},)" if graph.outputs else "    return ()")
    return "\n".join(lines) + "\n"


def compile_step(graph: Graph, device: torch.device | str = "cpu") -> Step:
    """The step as a callable on ``device``; it runs without autograd and changes the weights in place."""
    namespace: dict[str, Any] = {"host": Host(device)}
    for op in graph.ops:
        if op.target not in _OWN:
            # The builtin behind the overload: one Python call less per operator.
            namespace[_function(op.target)] = resolve(op.target)._op
        for const in _constants((op.args, tuple(a for _, a in op.kwargs))):
            namespace[_constant(const)] = constant(const, device)
    source = generate(graph)
    exec(compile(source, "<magis step>", "exec"), namespace)  # noqa: S102  (our own source, made a line above)
    body = namespace["step"]

    def step(tensors: Sequence[Tensor], scalars: Mapping[str, float]) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return body(tensors, scalars)  # type: ignore[no-any-return]

    return step


def _call(op: Op) -> str:
    args = [_arg(arg) for arg in op.args] + [f"{name}={_arg(arg)}" for name, arg in op.kwargs]
    function = _OWN.get(op.target) or _function(op.target)
    call = f"{function}({', '.join(args)})"
    names = [_name(value) if value is not None else "none" for value in op.outputs]
    if not names or (not op.many and names == ["none"]):
        return call
    return f"({', '.join(names)},) = {call}" if op.many else f"{names[0]} = {call}"


def _arg(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return _name(arg.value)
    if isinstance(arg, Scalar):
        return arg.name
    if isinstance(arg, Const):
        return _constant(arg)
    if isinstance(arg, tuple):
        return f"[{', '.join(_arg(item) for item in arg)}]"
    if isinstance(arg, float) and (arg != arg or arg in (float("inf"), float("-inf"))):  # noqa: PLR0124
        return f"float({str(arg)!r})"
    return repr(arg)


def _name(value: int) -> str:
    return f"v{value}"


def _function(target: str) -> str:
    return target.replace(".", "_")


def _constant(const: Const) -> str:
    return f"{const.kind}_{const.name}".replace(":", "_")


def _walk(arg: Arg) -> list[Arg]:
    return [found for item in arg for found in _walk(item)] if isinstance(arg, tuple) else [arg]


def _scalars(arg: Arg) -> list[str]:
    return [item.name for item in _walk(arg) if isinstance(item, Scalar)]


def _constants(arg: Arg) -> list[Const]:
    return [item for item in _walk(arg) if isinstance(item, Const)]
