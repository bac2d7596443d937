"""Calls of a graph's operators through torch, conversion of arguments, and `magis.expect`, a guard on data."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from magis.errors import MagisError
from magis.graph.nodes import Arg, Const, Graph, Op, Ref, Scalar, Value
from magis.ops.generators import MADE, SEED_MADE
from magis.ops.operators import op_info

_HALF = (torch.float16, torch.bfloat16)


def as_mixed(target: str, args: Sequence[Any], out: Any) -> Any:
    """Return the fake results ``out`` of a call in the dtypes of the real kernel: norms with mixed precision; attention
    in float64, whose statistics torch before 2.13 states as float32."""
    if target == "aten._scaled_dot_product_flash_attention_for_cpu.default" and args[0].dtype == torch.float64:
        return (out[0], _typed(out[1], torch.float64))
    if target == "aten.native_group_norm_backward.default":
        return (_typed(out[0], args[1].dtype), *out[1:])
    parameters = [args[at] for at in op_info(target).parameters if at < len(args)]
    wide = any(isinstance(each, Tensor) and each.dtype == torch.float32 for each in parameters)
    if not wide or args[0].dtype not in _HALF:
        return out
    return (out[0], *(_typed(each, torch.float32) for each in out[1:]))


def _typed(tensor: Any, dtype: torch.dtype) -> Any:
    same = not isinstance(tensor, Tensor) or tensor.dtype == dtype
    return tensor if same else torch.empty_like(tensor, dtype=dtype)


_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


class CallError(MagisError):
    """An operator or an argument does not exist in the installed torch."""


def resolve(target: str) -> OpOverload:
    """Return the OpOverload named `target`: "aten.mm.default" is `torch.ops.aten.mm.default`.

    Raises CallError if the text is not "namespace.operator.overload", or the installed torch has no such overload.
    """
    parts = target.split(".")
    if len(parts) != 3 or not all(parts):
        raise CallError(
            f"not an operator: {target!r}", hint="write namespace.operator.overload, such as aten.mm.default"
        )
    found = registered(target)
    if found is None:
        raise CallError(
            f"torch {torch.__version__} has no operator {target}",
            hint="import the library that registers it, or capture again under this torch version",
        )
    return found


def registered(target: str) -> OpOverload | None:
    """Return the OpOverload that torch has under a name now, or None.

    A user may register an operator again (a notebook's cell), and torch then frees the one before: a cache of what an
    operator does takes the OpOverload into its key, and none finds an OpOverload by its name.
    """
    found: Any = torch.ops
    for part in target.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            return None
    return found if isinstance(found, OpOverload) else None


def constant(const: Const, device: torch.device | str, generators: Mapping[str, torch.Generator] | None = None) -> Any:
    """Return the torch object of a `Const` argument; every device becomes `device`, as a graph is traced on the CPU.

    A generator made within the step, and any generator if `generators` is None, becomes a new one with seed 0. Raises
    CallError for a name that `generators` or torch lacks.
    """
    if const.kind == "device":
        return torch.device(device)
    if const.kind == "generator":
        if generators is None or (const.name.startswith(MADE) and const.name not in generators):
            return torch.Generator(device).manual_seed(0)
        if const.name not in generators:
            raise CallError(
                f"the step draws from a generator that was found at {const.name!r}, where there is none now",
                hint="put it back, or plan the step anew",
            )
        return generators[const.name]
    found = getattr(torch, const.name, None) if const.kind in _KINDS else None
    if found is None or not isinstance(found, _KINDS[const.kind]):
        raise CallError(f"torch {torch.__version__} has no {const.kind} named {const.name!r}")
    return found


def to_torch(
    arg: Arg,
    tensors: Mapping[int, torch.Tensor],
    scalars: Mapping[str, float],
    device: torch.device | str = "cpu",
    generators: Mapping[str, torch.Generator] | None = None,
) -> Any:
    """Return `arg` for torch: tensors by value id, scalars by name, constants on `device`, tuples as lists.

    Raises CallError for a value that `tensors` lacks or a name that `scalars` lacks.
    """
    match arg:
        case Ref(value):
            if value not in tensors:
                raise CallError(f"no tensor for value {value}")
            return tensors[value]
        case Scalar(name):
            if name not in scalars:
                known = ", ".join(sorted(scalars)) or "none"
                raise CallError(f"no number for the scalar {name!r}; given: {known}")
            return scalars[name]
        case Const():
            return constant(arg, device, generators)
        case tuple():
            return [to_torch(item, tensors, scalars, device, generators) for item in arg]
        case _:
            return arg


def from_torch(value: object) -> Arg:
    """Return a torch argument that is no tensor as a graph argument: literals, lists, dtypes, devices, layouts.

    Raises CallError for other types, such as a symbolic size or a generator.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(from_torch(item) for item in value)
    if isinstance(value, torch.device):
        return Const("device", value.type)
    for kind, known in _KINDS.items():
        if isinstance(value, known):
            return Const(kind, str(value).removeprefix("torch."))
    raise CallError(f"an argument of type {type(value).__name__} has no form in the graph: {value!r}")


def outputs(result: object) -> tuple[torch.Tensor | None, ...]:
    """Return an operator's result as a flat tuple, with None for each None (an undefined tensor)."""
    items = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(item if isinstance(item, torch.Tensor) else None for item in items)


def made_generators(graph: Graph) -> dict[str, torch.Generator]:
    """Return new CPU generators for the generators that the step itself makes, by name."""
    arguments = (dict(op.kwargs).get("generator") for op in graph.ops if op.target == SEED_MADE)
    return {each.name: torch.Generator() for each in arguments if isinstance(each, Const)}


def call(
    op: Op,
    tensors: Mapping[int, torch.Tensor],
    scalars: Mapping[str, float],
    device: torch.device | str = "cpu",
    generators: Mapping[str, torch.Generator] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Run one operator and return its outputs as a tuple (see `outputs`); `tensors` maps value ids to its inputs."""
    args = [to_torch(arg, tensors, scalars, device, generators) for arg in op.args]
    kwargs = {name: to_torch(arg, tensors, scalars, device, generators) for name, arg in op.kwargs}
    return outputs(as_mixed(op.target, args, resolve(op.target)(*args, **kwargs)))


# An operator of our own for branches on data: a guard that compares a tensor with the number that Python read from
# it during capture.
#
#     magis.expect(%x, True)        the one element of %x is true, as it was when the step was captured
#     magis.expect(%x, False, %y)   the contents of %x and %y differ
#     magis.expect(%x, 5, how="<")  the one element of %x is below 5: a check for which torch itself raises an error
#
# Results whose shape depends on data (`x[mask]`, `mask.nonzero()`) must have the captured shape.
# In a graph, guards write a storage of 0 bytes whose last version the backward reads: gradients, and so the weight
# update, run after all guards.

EXPECT = "magis.expect.default"


_SILENT = ("profiler", "debug_mode_ops")
_TORCHS = ("aten", "prims", "c10d", "_c10d_functional", *_SILENT)


def only_acts(target: str) -> bool:
    """Return True for an operator that returns and writes no tensor: it is called to check or to print something.

    A graph orders such an operator among its guards on data. A user's custom operator may return numbers.
    """
    namespace = target.partition(".")[0]
    if namespace in _SILENT or (namespace == "magis" and target != EXPECT):
        return False
    return _only_acts(resolve(target), namespace)


@functools.lru_cache(maxsize=4096)
def _only_acts(overload: OpOverload, namespace: str) -> bool:
    schema = overload._schema
    given = any("Tensor" in str(result.type) for result in schema.returns)
    return not (schema.is_mutable or given) and (not schema.returns or namespace not in _TORCHS)


class ExpectationError(MagisError):
    """A branch or a shape that depends on data differs from the captured step."""


_HOW = {"==": operator.eq, ">=": operator.ge, "<": operator.lt}


def _expect(value: Tensor, expected: float, other: Tensor | None = None, *, how: str = "==") -> None:
    found = value.item() if other is None else torch.equal(value, other)
    if not _HOW[how](found, expected):
        was = f"{expected} when it was captured" if how == "==" else f"and eager mode raises unless {how} {expected}"
        raise ExpectationError(
            f"a tensor that the step branches on is {found} for this batch, {was}",
            hint="use torch.where in place of the branch",
        )


def expect_shape(made: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ExpectationError unless a result has the captured shape."""
    if made.shape != shape:
        raise ExpectationError(
            f"a shape that hangs on data is {list(made.shape)} for this batch, {list(shape)} when it was captured",
            hint="use torch.where in place of choosing elements",
        )


def shaped_by_contents(op: Op, values: Mapping[int, Value]) -> bool:
    """Return True if the output shapes of a call depend on the contents of its input tensors."""
    if not op.target.startswith("aten.") or torch.Tag.dynamic_output_shape not in resolve(op.target).tags:
        return False
    return op.target != "aten.index.Tensor" or any(values[n].dtype in ("bool", "uint8") for n in op.inputs()[1:])


def follows_data(graph: Graph) -> bool:
    """Return True if the graph has guards on data, and so is valid only for batches that pass them."""
    return any(op.target == EXPECT or shaped_by_contents(op, graph.values) for op in graph.ops)


_LIBRARY = torch.library.Library("magis", "FRAGMENT")
_LIBRARY.define("expect(Tensor value, Scalar expected, Tensor? other=None, *, str how='==') -> ()")
_LIBRARY.impl("expect", _expect, "CPU")
_LIBRARY.impl("expect", _expect, "CUDA")
_LIBRARY.impl("expect", lambda *_, **__: None, "Meta")  # no contents to compare


def in_parts(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run under ``mode`` the operators of which a composite one is made; return NotImplemented for any other. In
    inference mode, torch leaves that to the dispatch mode."""
    with mode:
        return func.decompose(*args, **kwargs)
