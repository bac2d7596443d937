"""Signatures: one readable line that says all that an operator's cost depends on.

    aten.addmm.default(float32[768]{1}, float32[512,768]{768,1}, float32[768,768]{1,768}, beta=0.5)

Tensors are written `dtype[shape]{strides}`, with `~conj` or `~neg` behind it where that bit is set, lists in
brackets, torch's constants as `dtype:float32`, complex numbers as `1.0-2.0j`, numbers that are known only when
the step runs as `$`. Left out on purpose: value ids, storage offsets, scalar names, the names of generators and of
the device (costs are stored per device). Calls of equal signature take the same time and the same workspace. `parse`
reads the line back, so that a stored cost can be measured again without the graph it is from.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from magis.errors import MagisError
from magis.graph.nodes import BITS, ITEM_SIZE, Arg, Const, Op, Ref, Scalar, Value
from magis.graph.text import complex_text

_TENSOR = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\]\{(?P<stride>[\d,]*)\}(?P<bits>(?:~\w+)*)")
_CONST = re.compile(r"(?P<kind>dtype|device|layout|memory_format|generator):(?P<name>\w*)")
_COMPLEX = re.compile(r"-?(?:inf|nan|\d[\d.e]*(?:(?<=e)[+-]\d+)?)[+-](?:inf|nan|\d[\d.e]*(?:(?<=e)[+-]\d+)?)j")
_FLOAT = re.compile(r"-?(?:inf|nan)\b")
_LITERAL = re.compile(r"None|True|False|-?\d[\w.]*(?:[+-]\d+)?|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_KEYWORD = re.compile(r"([A-Za-z_]\w*)=")
_BITS = ((), BITS[:1], BITS[1:], BITS)
_HEAD = re.compile(r"([\w.]+)\(")


class SignatureError(MagisError):
    """A text is not the signature of an operator."""


def signature(op: Op, values: Mapping[int, Value]) -> str:
    """The signature of `op`, whose inputs `values` knows."""
    parts = [_text(arg, values) for arg in op.args]
    parts += [f"{name}={_text(arg, values)}" for name, arg in op.kwargs]
    return f"{op.target}({', '.join(parts)})"


def _text(arg: Arg, values: Mapping[int, Value]) -> str:
    match arg:
        case Ref(value):
            return tensor_text(values[value])
        case Scalar():
            return "$"
        case Const(kind, name):
            return f"{kind}:" if kind in ("device", "generator") else f"{kind}:{name}"
        case tuple():
            return f"[{', '.join(_text(item, values) for item in arg)}]"
        case complex():
            return complex_text(arg)
        case _:
            return repr(arg)


def tensor_text(value: Value) -> str:
    """A tensor as signatures write it: `float32[2,3]{3,1}`; sizes and strides in elements."""
    bits = "".join(f"~{bit}" for bit in value.bits)
    return f"{value.dtype}[{_numbers(value.shape)}]{{{_numbers(value.stride)}}}{bits}"


def _numbers(items: tuple[int, ...]) -> str:
    return ",".join(str(item) for item in items)


def parse(text: str) -> tuple[Op, dict[int, Value]]:
    """The call that `text` describes: an operator without outputs, and its inputs, each on a storage of its
    own.

    Raises SignatureError when the text is no signature. `signature(*parse(text)) == text` for every
    signature.
    """
    try:
        return _SignatureReader(text).read()
    except (ValueError, RecursionError) as error:  # numbers and lists beyond what Python reads
        raise SignatureError(f"not an operator's signature: {text[:80]!r}: {type(error).__name__}") from None


class _SignatureReader:
    """Reads one signature from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.values: dict[int, Value] = {}

    def read(self) -> tuple[Op, dict[int, Value]]:
        head = self.match(_HEAD)
        if head is None:
            raise self.error("an operator's name and an opening parenthesis")
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        while not self.take(")"):
            if (args or kwargs) and not self.take(", "):
                raise self.error("a comma or the closing parenthesis")
            keyword = self.match(_KEYWORD)
            if keyword is not None:
                kwargs.append((keyword[1], self.argument()))
            elif kwargs:
                raise self.error("a keyword argument")
            else:
                args.append(self.argument())
        if self.at != len(self.text):
            raise self.error("the end")
        return Op(0, head[1], tuple(args), tuple(kwargs), ()), self.values

    def argument(self) -> Arg:
        if self.take("$"):
            return Scalar("$")
        if self.take("["):
            return self.items()
        if (const := self.match(_CONST)) is not None:
            return Const(const["kind"], const["name"])
        if (number := self.match(_COMPLEX)) is not None:
            return complex(number[0])
        if (number := self.match(_FLOAT)) is not None:
            return float(number[0])
        if (tensor := self.match(_TENSOR)) is not None:
            return self.tensor(tensor)
        if (literal := self.match(_LITERAL)) is not None:
            return self.literal(literal[0])
        raise self.error("an argument")

    def items(self) -> Arg:
        found: list[Arg] = []
        while not self.take("]"):
            if found and not self.take(", "):
                raise self.error("a comma or the closing bracket")
            found.append(self.argument())
        return tuple(found)

    def literal(self, text: str) -> Arg:
        try:
            value: Arg = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise self.error(f"a literal instead of {text}") from None
        return value

    def tensor(self, found: re.Match[str]) -> Ref:
        shape, stride = (tuple(int(size) for size in found[part].split(",") if size) for part in ("shape", "stride"))
        bits = tuple(found["bits"].split("~")[1:])
        if found["dtype"] not in ITEM_SIZE or len(shape) != len(stride) or bits not in _BITS:
            raise self.error(f"a tensor instead of {found[0]}")
        number = len(self.values)
        self.values[number] = Value(number, shape, stride, found["dtype"], number, bits=bits)
        return Ref(number)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def take(self, text: str) -> bool:
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def error(self, expected: str) -> SignatureError:
        return SignatureError(f"not an operator's signature: {self.text[:200]!r}: expected {expected} at {self.at}")
