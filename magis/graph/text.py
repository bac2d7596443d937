"""Text form of a graph: readable, diffable, lossless. ``parse(dump(graph)) == graph``.

    magis graph 1
    storage 3 parameter 1024
    value 5 @3 float32 [16, 16] {16, 1} +0 "parameter:weight"
    value 6 @4 complex64 [8] {1} +0 conj
    constant 9 [0.5]
    input 5
    op 0 %40 = aten.mm.default(%7, %5) reads 2:0 3:0 phase forward module "layers.0"
    output 40

``%5`` is a value, ``$neg_lr`` a scalar known only at run time, ``<dtype float32>`` a constant of torch, ``1.0-2.0j`` a
complex number; ``conj`` and ``neg`` behind a value are its lazy bits (``BITS``). The body of a loop follows its
operator, indented, in this form, up to the line ``end``. Parsing executes no code and checks only the syntax; call
``verify`` afterwards.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from magis.errors import MagisError
from magis.graph.nodes import BITS, Arg, Const, Graph, Loop, Op, Ref, Scalar, Storage, Value

HEADER = "magis graph 1"
END = "end"
MAX_DEPTH = 20
MAX_DIGITS = 20
"""Most digits of an integer: enough for 64 bits."""


class GraphTextError(MagisError):
    """The text is no graph; the message names the line."""


def dump(graph: Graph) -> str:
    """Return the graph as text, one line per storage, value and operator."""
    return "\n".join([HEADER, *_lines(graph)]) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    yield from (f"storage {s.id} {s.kind} {s.nbytes}" for s in graph.storages.values())
    yield from (
        f"value {v.id} @{v.storage} {v.dtype} {_ints(v.shape)} {{{_ints(v.stride)[1:-1]}}} +{v.offset}"
        + "".join(f" {bit}" for bit in v.bits)
        + (f" {json.dumps(v.name)}" if v.name else "")
        for v in graph.values.values()
    )
    yield from (f"constant {key} {_arg_text(data)}" for key, data in graph.constants.items())
    yield from (f"input {value}" for value in graph.inputs)
    for op in graph.ops:
        yield _op_text(op)
        if op.body is not None:
            yield from (f"  {line}" for line in _lines(op.body.graph))
            yield END
    yield from (f"output {value}" for value in graph.outputs)


def digest(graph: Graph) -> str:
    """Return the first 16 hex digits of the SHA-256 of the graph's text form."""
    return hashlib.sha256(dump(graph).encode()).hexdigest()[:16]


def _ints(items: tuple[int, ...]) -> str:
    return f"[{', '.join(str(item) for item in items)}]"


def _op_text(op: Op) -> str:
    outputs = ", ".join("_" if value is None else f"%{value}" for value in op.outputs)
    outputs = f"({outputs})" if op.many else outputs
    args = [_arg_text(arg) for arg in op.args] + [f"{name}={_arg_text(arg)}" for name, arg in op.kwargs]
    line = f"op {op.id} {outputs}{' ' if outputs else ''}= {op.target}({', '.join(args)})"
    for word, versions in (("reads", op.reads), ("writes", op.writes)):
        if versions:
            line += f" {word} " + " ".join(f"{storage}:{version}" for storage, version in versions)
    line += " random" if op.random else ""
    line += f" phase {op.phase}"
    line += f" module {json.dumps(op.module)}" if op.module else ""
    line += f" origin {op.origin}" if op.origin is not None else ""
    line += f" parts {op.body.parts}" if op.body is not None else ""
    return line


def _arg_text(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return f"%{arg.value}"
    if isinstance(arg, Scalar):
        return f"${arg.name}"
    if isinstance(arg, Const):
        return f"<{arg.kind} {arg.name}>"
    if isinstance(arg, tuple):
        return f"[{', '.join(_arg_text(item) for item in arg)}]"
    if isinstance(arg, str):
        return json.dumps(arg)
    return complex_text(arg) if isinstance(arg, complex) else repr(arg)


def complex_text(number: complex) -> str:
    """Return a text that `complex` parses back bit for bit; Python's `repr` loses signs of zeros."""
    return f"{number.real!r}{number.imag:+}j"


_FLOAT = r"(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_TOKEN = re.compile(
    r"""\s*(?:(?P<ref>%\d+)|(?P<scalar>\$[A-Za-z_]\w*)|<(?P<kind>\w+)\ (?P<const>[\w:.]+)>"""
    r"""|(?P<string>"(?:[^"\\]|\\.)*")"""
    rf"""|(?P<complex>-?{_FLOAT}[+-]{_FLOAT}j)"""
    r"""|(?P<number>-?(?:inf|nan)\b|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<word>[\w.]+)|(?P<mark>[()\[\]{}=,+@:]))""",
    re.VERBOSE | re.ASCII,
)


class _Line:
    """Token stream of one line."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        position = 0
        text = text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ValueError(f"unexpected {_short(text[position:].lstrip())}")
            kind = str(match.lastgroup)
            found = match.group(kind)
            self.tokens.append((kind, f"{match.group('kind')} {found}" if kind == "const" else found))
            position = match.end()
        self.next = 0

    def peek(self) -> str:
        return self.tokens[self.next][1] if self.next < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        kind, text = self.token()
        if expected is not None and text != expected:
            raise ValueError(f"expected {expected!r}, found {_short(text)} ({kind})")
        return text

    def token(self) -> tuple[str, str]:
        if self.next >= len(self.tokens):
            raise ValueError("the line ends too early")
        self.next += 1
        return self.tokens[self.next - 1]

    def integer(self) -> int:
        return _integer(self.take())

    def value(self) -> int:
        kind, text = self.token()
        if kind != "ref":
            raise ValueError(f"expected a value such as %5, found {_short(text)}")
        return _integer(text[1:])

    def name(self) -> str:
        text = self.take()
        if not text.isidentifier():
            raise ValueError(f"expected a name, found {_short(text)}")
        return text

    def string(self) -> str:
        kind, text = self.token()
        if kind != "string":
            raise ValueError(f"expected a quoted name, found {_short(text)}")
        return _unquoted(text)

    def items(self, end: str, read: Callable[[], Any]) -> Iterator[Any]:
        while self.peek() != end:
            yield read()
            if self.peek() == ",":
                self.take(",")
        self.take(end)

    def arg(self, depth: int = 0) -> Arg:
        if depth > MAX_DEPTH:
            raise ValueError(f"lists nested more than {MAX_DEPTH} deep")
        kind, text = self.token()
        if text == "[" and kind == "mark":
            return tuple(self.items("]", lambda: self.arg(depth + 1)))
        if kind == "ref":
            return Ref(_integer(text[1:]))
        if kind == "scalar":
            return Scalar(text[1:])
        if kind == "const":
            first, _, second = text.partition(" ")
            return Const(first, second)
        if kind == "string":
            return _unquoted(text)
        if kind == "number":
            return _integer(text) if text.lstrip("-").isdigit() else float(text)
        if kind == "complex":
            return complex(text)
        if text in ("True", "False", "None"):
            return {"True": True, "False": False, "None": None}[text]
        raise ValueError(f"unexpected {_short(text)}")


def _integer(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > MAX_DIGITS:
        raise ValueError(f"expected a whole number, found {_short(text)}")
    return int(text)


def _unquoted(text: str) -> str:
    found = str(json.loads(text))
    found.encode()  # refuses halves of characters, which no digest could be made of
    return found


def _short(text: str) -> str:
    """Return the first 20 characters of a text for a message: untrusted texts can be megabytes."""
    return repr(text if len(text) <= 20 else f"{text[:20]}...")


def parse(text: str) -> Graph:
    """Parse the text form of a graph. Raises GraphTextError, which names the line, for any other text."""
    lines = text.splitlines()
    if not lines or lines[0] != HEADER:
        raise GraphTextError(
            f"line 1 is {lines[0][:40] if lines else ''!r}, not {HEADER!r}", hint="save the graph again"
        )
    readers = [_Reader()]
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        try:
            if line.strip() == END:
                if len(readers) == 1:
                    raise ValueError(f"{END!r} without a loop")
                body = readers.pop().graph()
                readers[-1].attach(body)
            elif readers[-1].line(_Line(line)):
                readers.append(_Reader())
                if len(readers) > MAX_DEPTH:
                    raise ValueError(f"loops nested more than {MAX_DEPTH} deep")
        except (ValueError, IndexError) as error:
            raise GraphTextError(f"line {number} of the graph: {error}") from error
    if len(readers) > 1:
        raise GraphTextError(f"line {len(lines)} of the graph: the text ends within the body of a loop")
    return readers[0].graph()


def _fresh(key: int, known: Mapping[int, object]) -> int:
    if key in known:
        raise ValueError(f"{key} is described twice")
    return key


class _Reader:
    def __init__(self) -> None:
        self._storages: dict[int, Storage] = {}
        self._values: dict[int, Value] = {}
        self._constants: dict[int, tuple[complex | Scalar, ...]] = {}
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._ops: list[Op] = []
        self._parts = 0  # of the loop whose body comes next

    def attach(self, body: Graph) -> None:
        """Set the body of the last operator, a loop."""
        self._ops[-1] = replace(self._ops[-1], body=Loop(self._parts, body))

    def line(self, line: _Line) -> bool:
        """Parse one line; return True if the body of a loop follows."""
        self._parts = 0
        word = line.take()
        readers: dict[str, Callable[[_Line], None]] = {
            "storage": self._read_storage, "value": self._read_value, "constant": self._read_constant,
            "op": self._read_op,
            "input": lambda rest: self._inputs.append(rest.integer()),
            "output": lambda rest: self._outputs.append(rest.integer()),
        }  # fmt: skip
        if word not in readers:
            raise ValueError(f"unknown entry {_short(word)}")
        readers[word](line)
        if line.peek():
            raise ValueError(f"unexpected {_short(line.peek())} at the end")
        return self._parts > 0

    def graph(self) -> Graph:
        return Graph(
            self._storages, self._values, tuple(self._ops), tuple(self._inputs), tuple(self._outputs), self._constants
        )

    def _read_storage(self, line: _Line) -> None:
        key, kind, nbytes = _fresh(line.integer(), self._storages), line.name(), line.integer()
        self._storages[key] = Storage(key, nbytes, kind)

    def _read_value(self, line: _Line) -> None:
        key = _fresh(line.integer(), self._values)
        line.take("@")
        storage, dtype = line.integer(), line.take()
        line.take("[")
        shape = tuple(line.items("]", line.integer))
        line.take("{")
        stride = tuple(line.items("}", line.integer))
        line.take("+")
        offset = line.integer()
        bits = tuple(line.take() for bit in BITS if line.peek() == bit)
        name = line.string() if line.peek() else ""
        self._values[key] = Value(key, shape, stride, dtype, storage, offset, name, bits)

    def _read_constant(self, line: _Line) -> None:
        key, data = _fresh(line.integer(), self._constants), line.arg()
        if not isinstance(data, tuple) or not all(isinstance(item, (int, float, complex)) for item in data):
            raise ValueError("a constant is a list of numbers")
        self._constants[key] = tuple(item for item in data if isinstance(item, (int, float, complex)))

    def _read_op(self, line: _Line) -> None:
        key = line.integer()
        many = line.peek() == "("
        if many:
            line.take()
        outputs = tuple(line.items(")" if many else "=", lambda: self._read_output(line)))
        if many:
            line.take("=")
        target = line.take()
        if not all(part.isidentifier() for part in target.split(".")):
            raise ValueError(f"expected an operator, found {_short(target)}")
        line.take("(")
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        while line.peek() != ")":
            named = line.next + 1 < len(line.tokens) and line.tokens[line.next + 1][1] == "="
            if named:
                name = line.name()
                line.take("=")
                kwargs.append((name, line.arg()))
            else:
                args.append(line.arg())
            if line.peek() == ",":
                line.take(",")
        line.take(")")
        found: dict[str, Any] = {"reads": (), "writes": (), "random": False, "phase": "forward", "module": ""}
        found["origin"] = None
        while line.peek():
            self._read_fact(line, found)
        self._ops.append(Op(key, target, tuple(args), tuple(kwargs), outputs, many, **found))

    def _read_fact(self, line: _Line, found: dict[str, Any]) -> None:
        word = line.take()
        if word in ("reads", "writes"):
            pairs = []
            while line.peek().isdigit():
                storage = line.integer()
                line.take(":")
                pairs.append((storage, line.integer()))
            found[word] = tuple(pairs)
        elif word == "random":
            found["random"] = True
        elif word == "phase":
            found["phase"] = line.name()
        elif word == "module":
            found["module"] = line.string()
        elif word == "origin":
            found["origin"] = line.integer()
        elif word == "parts":
            self._parts = line.integer()
            if self._parts < 1:
                raise ValueError(f"a loop has at least one part, not {self._parts}")
        else:
            raise ValueError(f"unknown fact {_short(word)}")

    def _read_output(self, line: _Line) -> int | None:
        if line.peek() == "_":
            line.take("_")
            return None
        return line.value()
