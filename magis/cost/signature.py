"""Signatures: one readable line with everything that an operator's cost depends on.

    aten.addmm.default(float32[768]{1}, float32[512,768]{768,1}, float32[768,768]{1,768}, beta=0.5)

Tensors are written `dtype[shape]{strides}`, followed by `~conj` or `~neg` if that bit is set; lists in brackets,
torch's constants as `dtype:float32`, complex numbers as `1.0-2.0j`, scalars known only at run time as `$`. Left out on
purpose: value ids, storage offsets, scalar names, generator names and the device's name (costs are stored per device).
Calls with equal signatures have equal time and workspace. `parse` reads a signature back, so that its cost can be
measured without the graph.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping

from magis.errors import MagisError
from magis.graph.nodes import BITS, ITEM_SIZE, Arg, Const, Op, Ref, Scalar, Value
from magis.graph.text import complex_text

_FLOAT = r"(?:inf|nan|\d[\d.e]*(?:(?<=e)[+-]\d+)?)"
_WORD = re.compile(
    r"(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\]\{(?P<stride>[\d,]*)\}(?P<bits>(?:~\w+)*)"
    r"|(?P<kind>dtype|device|layout|memory_format|generator):(?P<name>\w*)"
    rf"|(?P<complex>-?{_FLOAT}[+-]{_FLOAT}j)|(?P<float>-?(?:inf|nan)\b)|(?P<scalar>\$)|(?P<keyword>[A-Za-z_]\w*)="
)
"""Tokens of a signature that are not Python literals. Strings match first, so that nothing inside one is a token."""
_HEAD = re.compile(r"([\w.]+)\(")


class SignatureError(MagisError):
    """A text is not the signature of an operator."""


def signature(op: Op, values: Mapping[int, Value]) -> str:
    """Return the signature of `op`; `values` has its inputs."""
    parts = [_arg_text(arg, values) for arg in op.args]
    parts += [f"{name}={_arg_text(arg, values)}" for name, arg in op.kwargs]
    return f"{op.target}({', '.join(parts)})"


def _arg_text(arg: Arg, values: Mapping[int, Value]) -> str:
    match arg:
        case Ref(value):
            tensor = values[value]
            return _tensor_text(tensor.dtype, tensor.shape, tensor.stride, tensor.bits)
        case Scalar():
            return "$"
        case Const(kind, name):
            return f"{kind}:" if kind in ("device", "generator") else f"{kind}:{name}"
        case tuple():
            return f"[{', '.join(_arg_text(item, values) for item in arg)}]"
        case complex():
            return complex_text(arg)
        case _:
            return repr(arg)


@functools.lru_cache(maxsize=65536)  # a step has few distinct tensor layouts
def _tensor_text(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], bits: tuple[str, ...]) -> str:
    """Return a tensor as written in signatures, `float32[2,3]{3,1}`; sizes and strides in elements."""
    sizes, strides = (",".join(map(str, items)) for items in (shape, stride))
    return f"{dtype}[{sizes}]{{{strides}}}{''.join(f'~{bit}' for bit in bits)}"


def parse(text: str) -> tuple[Op, dict[int, Value]]:
    """Return the call of a signature: an operator without outputs, and its inputs, each on a separate storage.

    Raises SignatureError if the text is not a signature. `signature(*parse(text)) == text` for every signature.
    """
    head = _HEAD.match(text)
    values: dict[int, Value] = {}
    taken: list[Arg] = []

    def renamed(found: re.Match[str]) -> str:
        """Replace a tensor or constant, for which Python has no literal, by a name."""
        if found["text"] is not None:
            return found[0]
        if found["keyword"] is not None:
            return f"_{found['keyword']}="
        taken.append(_argument(found, values))
        return f"_{len(taken) - 1}"

    def argument(node: ast.expr) -> Arg:
        match node:
            case ast.Name(id=name):
                return taken[int(name[1:])]
            case ast.List(elts=items):
                return tuple(argument(item) for item in items)
            case _:
                literal = ast.literal_eval(node)
                if not isinstance(literal, (int, float, str, type(None))):
                    raise TypeError(f"no literal: {literal!r}")
                return literal

    try:
        call = ast.parse(f"_({_WORD.sub(renamed, text[head.end() :])}" if head else "", mode="eval").body
        if head is None or not isinstance(call, ast.Call):
            raise ValueError("not a call")
        kwargs = tuple(((each.arg or "")[1:], argument(each.value)) for each in call.keywords)
        op = Op(0, head[1], tuple(argument(each) for each in call.args), kwargs, ())
        if signature(op, values) != text:
            raise ValueError("written in another way")
    except (ValueError, TypeError, LookupError, SyntaxError, RecursionError, MemoryError) as error:
        reason = str(error).splitlines()[:1]
        raise SignatureError(f"not an operator's signature: {text[:200]!r}: {' '.join(reason)}") from None
    return op, values


def _argument(found: re.Match[str], values: dict[int, Value]) -> Arg:
    """Return the argument of a token; a tensor is added to `values`."""
    if found["kind"] is not None:
        return Const(found["kind"], found["name"])
    if found["complex"] is not None:
        return complex(found[0])
    if found["float"] is not None:
        return float(found[0])
    if found["scalar"] is not None:
        return Scalar("$")
    shape, stride = (tuple(int(size) for size in found[part].split(",") if size) for part in ("shape", "stride"))
    bits, number = tuple(found["bits"].split("~")[1:]), len(values)
    if (
        found["dtype"] not in ITEM_SIZE
        or len(shape) != len(stride)
        or bits != tuple(bit for bit in BITS if bit in bits)
    ):
        raise ValueError(f"no tensor: {found[0]}")
    values[number] = Value(number, shape, stride, found["dtype"], number, bits=bits)
    return Ref(number)
