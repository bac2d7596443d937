"""Code generation: a graph as straight-line Python, one line per operator, with every tensor deleted after its last
use.

The source is readable (``generate``), and runs below autograd: the graph has the backward's operators, so nothing is
saved for a backward. Its names are numbers, as two names of a user may become equal as identifiers; comments explain
them.
"""

from __future__ import annotations

import keyword
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from magis.fission.proof import last_part
from magis.graph import ARRIVED, STRETCH, Arg, Const, Graph, Loop, Op, Ref, Scalar
from magis.graph.hazards import last_uses
from magis.graph.loop_rules import ADDMM, ADDSUM, JOIN, MERGES, PART, REDUCE, rows_around
from magis.graph.text import complex_text
from magis.ops.call import constant, expect_shape, resolve, shaped_by_contents
from magis.ops.collectives import arrived, followed_by_wait, is_collective, under_way
from magis.ops.fake_results import IN_TRAINING
from magis.printable import printable
from magis.runtime.swap_streams import AnyHost, make_host

# Merges at run time that are no single call of torch.


def take_rows(whole: Tensor, dim: int, first: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Copy the rows of ``dim`` from ``first`` on to a tensor of this shape and stride; rows outside of `whole` are
    zeros."""
    made = torch.empty_strided(shape, stride, dtype=whole.dtype, device=whole.device)
    low, high = _rows_inside(whole, dim, first, shape[dim])
    made.narrow(dim, 0, low - first).zero_()
    made.narrow(dim, low - first, high - low).copy_(whole.narrow(dim, low, high - low))
    made.narrow(dim, high - first, first + shape[dim] - high).zero_()
    return made


def add_rows(whole: Tensor, dim: int, first: int, part: Tensor, *, clear: bool) -> None:
    """Add a part to the rows of ``dim`` from ``first`` on, without rows outside of `whole`; ``clear`` zeroes `whole`
    first."""
    if clear:
        whole.zero_()
    low, high = _rows_inside(whole, dim, first, part.shape[dim])
    whole.narrow(dim, low, high - low).add_(part.narrow(dim, low - first, high - low))


def add_product(whole: Tensor, left: Tensor, right: Tensor, *, clear: bool) -> None:
    """Add a matrix product to `whole`, or write it there with ``clear``; factors of half precision add to float32."""
    beta = 0 if clear else 1
    if left.dtype == whole.dtype:
        whole.addmm_(left, right, beta=beta)
    elif whole.is_cuda:
        torch.ops.aten.addmm.dtype_out(whole, left, right, whole.dtype, beta=beta, out=whole)
    else:  # torch has no such kernel
        whole.addmm_(left.to(whole.dtype), right.to(whole.dtype), beta=beta)


def add_sum(whole: Tensor, taken: Tensor, dims: tuple[int, ...], keep: bool = False, *, clear: bool) -> None:
    """Add a tensor's sum over dimensions to `whole`, or write it there with ``clear``."""
    total = torch.sum(taken, dims, keep, dtype=whole.dtype)
    if clear:
        whole.copy_(total)
    else:
        whole.add_(total)


def _rows_inside(whole: Tensor, dim: int, first: int, count: int) -> tuple[int, int]:
    """Return the range of those ``count`` rows from ``first`` on that the tensor has."""
    return max(first, 0), min(first + count, whole.shape[dim])


Name: TypeAlias = Callable[[int], str]
"""Returns the name of a value in the source."""

Step: TypeAlias = Callable[[Sequence[Tensor], Mapping[str, float]], tuple[Tensor, ...]]
"""Runs the step on the tensors of ``graph.inputs`` and values of named scalars; returns the tensors of
``graph.outputs``."""

CompiledStretch: TypeAlias = Callable[[list[Any]], Sequence[Tensor]]
"""Computes a stretch of operators from a list of tensors and numbers, which it empties."""


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """A plan with compiled functions in place of stretches of its operators."""

    graph: Graph
    """The plan, with each stretch as one operator."""
    functions: Mapping[str, CompiledStretch]
    """Functions by the names of these operators."""
    scratch: Mapping[str, int]
    """Bytes that they need beyond inputs and outputs, by signature."""
    operators: int
    """Number of the plan's operators in stretches, views not counted."""
    count: int
    """Number of stretches."""


_ON_HOST = {f"magis.{name}": f"host.{name}" for name in ("store", "load", "wait", "rng_save", "rng_enter", "rng_leave")}
"""Names in the source of magis's own operators, which run on the host."""
_FILE = "<magis step>"
_REDUCTION = {
    "sum": "{whole}.add_({part}) if {i} else {whole}.copy_({part})",
    "mean": "{whole}.add_({part}, alpha={share!r}) if {i} else {whole}.copy_({part}).mul_({share!r})",
    "max": "maximum({whole}, {part}, out={whole}) if {i} else {whole}.copy_({part})",
    "min": "minimum({whole}, {part}, out={whole}) if {i} else {whole}.copy_({part})",
    "same": "{i} or {whole}.copy_({part})",
}
"""Statements that merge a part's tensor into the whole, by kind of reduction; the first part is copied."""


@dataclass
class _ShortNames:
    """Names in the source of operators (asynchronous collectives separately), torch's constants and scalars."""

    functions: dict[tuple[str, bool], str] = field(default_factory=dict)
    constants: dict[Const, str] = field(default_factory=dict)
    scalars: dict[str, str] = field(default_factory=dict)

    def function(self, target: str, *, beside: bool = False) -> str:
        return self.functions.setdefault((target, beside), f"f{len(self.functions)}")

    def constant(self, const: Const) -> str:
        return self.constants.setdefault(const, f"c{len(self.constants)}")

    def scalar(self, name: str) -> str:
        return self.scalars.setdefault(name, f"s{len(self.scalars)}")


def generate(graph: Graph) -> str:
    """Return the Python source of a graph's step."""
    return "\n".join(_generate_lines(graph)[0]) + "\n"


def raised_by(graph: Graph, error: BaseException) -> tuple[Op | None, set[int]]:
    """Return the operator that raised an error, and the storages that were updated, fully or partly, before. The
    operator is None if the step's code did not raise the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
        trace = trace.tb_next
    count = 0 if trace is None else bisect_right(_generate_lines(graph)[1], trace.tb_lineno)
    done = {storage for op in graph.ops[:count] if op.phase == "update" for storage, _ in op.writes}
    return (graph.ops[count - 1] if count else None), done


def _generate_lines(graph: Graph) -> tuple[list[str], list[int], _ShortNames]:
    """Return the step's lines, the line number (from 1) of each operator, and the names in the lines."""
    numbered, body, begins = _ShortNames(), list[str](), list[int]()
    for line in _block_lines(graph, numbered, {}, "    ", 0, begin=lambda: begins.append(len(body) + 1)):
        body.append(line)
    lines = ["def step(tensors, scalars):"]
    if numbered.constants:
        known = (f"{name} is {const.kind} {const.name}" for const, name in numbered.constants.items())
        lines.append(f"    # {printable(', '.join(known))}")
    if graph.inputs:
        lines.append(f"    ({', '.join(f'v{value}' for value in graph.inputs)},) = tensors")
    lines.extend(f"    {own} = scalars[{name!r}]" for name, own in numbered.scalars.items())
    results = ", ".join(f"v{value}" for value in graph.outputs)
    end = f"    return ({results},)" if graph.outputs else "    return ()"
    return [*lines, *body, end], [len(lines) + first for first in begins], numbered


def _block_lines(
    graph: Graph,
    numbered: _ShortNames,
    outside: Mapping[int, str],
    indent: str,
    depth: int,
    parts: int = 1,
    last: bool = False,
    begin: Callable[[], None] = lambda: None,
    wholes: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield the lines of a graph's operators. ``outside`` names a loop body's values from the enclosing graph;
    ``wholes`` are those that loops make, with the depth of the loop. ``begin`` is called before the lines of each
    operator."""

    def name(value: int) -> str:
        return outside[value] if value in outside else f"{'p' * depth or 'v'}{value}"

    where = None
    beside = under_way(graph.ops)
    arriving: dict[int, int] = {}  # storage -> loaded value that no operator has used yet
    for op, forget in zip(graph.ops, last_uses(graph), strict=True):
        begin()
        here = printable(f"{op.phase} {op.module}").rstrip()  # safe in a comment for any module name
        if here != where and op.target not in (PART, *MERGES):
            yield f"{indent}# {here}"
            where = here
        yield from _ready_lines(arriving, [graph.values[value].storage for value in op.inputs()], name, indent)
        if op.body is not None:
            yield from _loop_lines(op, op.body, graph, numbered, name, indent, depth + 1, wholes)
        elif op.target in (PART, *MERGES):
            first = wholes.get(op.inputs()[0], depth)
            later = " or ".join(f"i{each}" for each in range(first, depth + 1))  # not the whole's first part
            yield f"{indent}{_merge_line(op, graph, name, f'i{depth}', parts, later, last=last)}"
        elif op.target.startswith(STRETCH):
            yield from _stretch_lines(op, forget, numbered, name, indent)
        else:
            yield f"{indent}{_call_line(op, numbered, name, beside)}"
            for value in op.made() if shaped_by_contents(op, graph.values) else ():
                yield f"{indent}expect_shape({name(value)}, {graph.values[value].shape})"
        if op.target == "magis.load":
            arriving.update((graph.values[value].storage, value) for value in op.made())
        if forget:
            # Also for unused loads: their copies must end before the memory is reused.
            yield from _ready_lines(arriving, [graph.values[value].storage for value in forget], name, indent)
        given_away = op.inputs() if op.target.startswith(STRETCH) else ()
        gone = [name(value) for value in forget if value not in given_away]
        if op.many and None in op.outputs:
            gone.append("none")  # some kernels make unrequested results
        if gone:
            yield f"{indent}del {', '.join(gone)}"
    yield from _ready_lines(arriving, list(arriving), name, indent)


def _ready_lines(arriving: dict[int, int], storages: Sequence[int], name: Name, indent: str) -> Iterator[str]:
    """Yield the lines that wait for loads to these storages, once for each load."""
    for storage in storages:
        value = arriving.pop(storage, None)
        if value is not None:
            yield f"{indent}host.ready({name(value)})"


def _loop_lines(
    op: Op,
    loop: Loop,
    graph: Graph,
    numbered: _ShortNames,
    name: Name,
    indent: str,
    depth: int,
    wholes: Mapping[int, int],
) -> Iterator[str]:
    """Yield the lines of a loop over parts: allocation of whole results, then the loop with its body."""
    victims = {graph.values[value].storage: value for value in op.inputs()}
    for value in op.made():
        whole = graph.values[value]
        if whole.storage in victims:  # in-place, part by part
            yield f"{indent}{name(value)} = {name(victims[whole.storage])}"
            continue
        dtype = numbered.constant(Const("dtype", whole.dtype))
        yield f"{indent}{name(value)} = empty({whole.shape}, {whole.stride}, dtype={dtype}, device=device)"
    around = (*op.inputs(), *op.made())
    outside = dict(zip(loop.graph.inputs, map(name, around), strict=True))
    known = {**wholes, **dict.fromkeys(op.made(), depth)}
    inside = {own: known[value] for own, value in zip(loop.graph.inputs, around, strict=True) if value in known}
    smaller = last_part(op, graph.values)
    yield f"{indent}for i{depth} in range({loop.parts - (smaller is not None)}):"
    yield from _block_lines(loop.graph, numbered, outside, f"{indent}    ", depth, loop.parts, wholes=inside)
    if smaller is not None:
        yield f"{indent}i{depth} = {loop.parts - 1}"
        yield from _block_lines(smaller, numbered, outside, indent, depth, loop.parts, last=True, wholes=inside)


def _merge_line(op: Op, graph: Graph, name: Name, index: str, parts: int, later: str, *, last: bool) -> str:
    """Return the line of an operator at the border of a loop: slice of a part, write of a part, reduction. ``later`` is
    false for the first part that is merged; ``last``: in a last part that is smaller."""
    if op.target in (ADDMM, ADDSUM):
        given = (name(arg.value) if isinstance(arg, Ref) else repr(arg) for arg in op.args)
        function = "add_product" if op.target == ADDMM else "add_sum"
        return f"{function}({', '.join(given)}, clear=not ({later}))"
    whole, how = op.inputs()[0], op.args[1 if op.target == PART else 2]
    if op.target == REDUCE:
        part_name = name(op.inputs()[1])
        return _REDUCTION[str(how)].format(whole=name(whole), part=part_name, i=later, share=1 / parts)
    part = graph.values[op.made()[0] if op.target == PART else op.inputs()[1]]
    around = rows_around(op)
    size = part.shape[how] - sum(around) if isinstance(how, int) else 0
    if any(around):
        first = f"{name(whole)}, {how}, {index} * {size} - {around[0]}"
        if op.target == JOIN:
            return f"add_rows({first}, {name(part.id)}, clear={index} == 0)"
        return f"{name(part.id)} = take_rows({first}, {part.shape}, {part.stride})"
    start = graph.values[whole].shape[how] - size if last and isinstance(how, int) else f"{index} * {size}"
    stretch = f"{name(whole)}.narrow({how}, {start}, {size})"
    if op.target == JOIN:
        return f"{stretch}.copy_({name(part.id)})"
    if part.storage != graph.values[whole].storage:
        like = f"{part.shape}, {part.stride}, dtype={name(whole)}.dtype, device=device"
        return f"{name(part.id)} = empty({like}).copy_({stretch})"
    return f"{name(part.id)} = {stretch}"


def compile_step(
    graph: Graph,
    device: torch.device | str = "cpu",
    between: Callable[[], None] | None = None,
    host: AnyHost | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    stretches: Mapping[str, CompiledStretch] = MappingProxyType({}),
) -> Step:
    """Compile a graph's step to a callable on ``device``; it runs without autograd and updates the weights in-place.
    ``between`` is called after every operator of torch. ``host`` holds swapped tensors. ``generators`` are the step's
    own generators, by name. ``stretches`` are compiled functions, by the names of their operators."""
    host = make_host(device) if host is None else host
    namespace: dict[str, Any] = {
        "host": host, "empty": torch.empty_strided, "device": torch.device(device), "maximum": torch.maximum,
        "minimum": torch.minimum, "take_rows": take_rows, "add_rows": add_rows,
        "add_product": add_product, "add_sum": add_sum,
        "expect_shape": expect_shape,
    }  # fmt: skip
    trains = any(op.phase == "backward" for op in graph.ops)
    lines, _, numbered = _generate_lines(graph)
    for (target, beside), name in numbered.functions.items():
        # The builtin of the overload saves a Python call per operator.
        function = stretches.get(target) or (arrived if target == ARRIVED else resolve(target)._op)
        if trains and target in IN_TRAINING:
            function = torch.enable_grad()(function)
        if is_collective(target) and not beside:
            function = followed_by_wait(function)
        if between is not None and not target.startswith("magis."):
            function = _followed_by(function, between)
        namespace[name] = function
    namespace.update({name: constant(each, device, generators or {}) for each, name in numbered.constants.items()})
    exec(compile("\n".join(lines), _FILE, "exec"), namespace)  # noqa: S102  (our own source, made a line above)
    body = namespace["step"]

    def step(tensors: Sequence[Tensor], scalars: Mapping[str, float]) -> tuple[Tensor, ...]:
        try:
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                return body(tensors, scalars)  # type: ignore[no-any-return]
        except BaseException:
            host.join()  # memory of a step that raised is freed now: no copy may still write to it
            raise

    return step


def _followed_by(function: Callable[..., Any], between: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        between()
        return result

    return call


def _call_line(op: Op, numbered: _ShortNames, name: Name, beside: Container[int]) -> str:
    """Return the line of an operator; ``beside`` holds the results of asynchronous collectives."""
    args = [_arg_source(arg, numbered, name) for arg in op.args]
    for key, arg in op.kwargs:
        text = _arg_source(arg, numbered, name)
        plain = key.isascii() and key.isidentifier() and not keyword.iskeyword(key)
        args.append(f"{key}={text}" if plain else f"**{{{key!r}: {text}}}")
    own = _ON_HOST.get(op.target)
    early = any(value in beside for value in op.made())
    called = f"{own or numbered.function(op.target, beside=early)}({', '.join(args)})"
    call = called if own else f"{called}  # {printable(op.target)}{' beside' if early else ''}"
    names = [name(value) if value is not None else "none" for value in op.outputs]
    if not names or (not op.many and names == ["none"]):
        return call
    return f"({', '.join(names)},) = {call}" if op.many else f"{names[0]} = {call}"


def _stretch_lines(op: Op, forget: Container[int], numbered: _ShortNames, name: Name, indent: str) -> Iterator[str]:
    """Yield the lines of a compiled stretch, which takes its inputs in a list, and frees each of them when it is done
    with it."""
    yield f"{indent}given = [{', '.join(_arg_source(arg, numbered, name) for arg in op.args)}]"
    gone = [name(value) for value in dict.fromkeys(op.inputs()) if value in forget]
    if gone:
        yield f"{indent}del {', '.join(gone)}"
    results = f"({', '.join(map(name, op.made()))},) = " if op.made() else ""
    yield f"{indent}{results}{numbered.function(op.target)}(given)  # {printable(op.target)}"


def _arg_source(arg: Arg, numbered: _ShortNames, name: Name) -> str:
    if isinstance(arg, Ref):
        return name(arg.value)
    if isinstance(arg, Scalar):
        return numbered.scalar(arg.name)
    if isinstance(arg, Const):
        return numbered.constant(arg)
    if isinstance(arg, tuple):
        return f"[{', '.join(_arg_source(item, numbered, name) for item in arg)}]"
    if isinstance(arg, complex):
        return f"complex({complex_text(arg)!r})"
    if isinstance(arg, float) and (arg != arg or arg in (float("inf"), float("-inf"))):  # noqa: PLR0124
        return f"float({str(arg)!r})"
    return repr(arg)
