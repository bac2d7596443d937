"""The closed world of a captured step: a value that its code can reach by a name is noticed when it changes.

Each row is a way of reading a value.
"""

# ruff: noqa: PLW0108  (every row says by itself what it reads and what changes)
from __future__ import annotations

import argparse
import array
import contextvars
import copy
import ctypes
import dataclasses
import enum
import functools
import importlib
import itertools
import os
import sys
import threading
import time
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from magis import MagisError, optimize

world = types.ModuleType("tests_world")
world.inner = types.ModuleType("tests_world.inner")  # type: ignore[attr-defined]


class Settings:
    kept = 1.0

    def __init__(self) -> None:
        self.a = 1.0
        self.hidden = {"a": 1.0}

    @property
    def through(self) -> float:
        return self.hidden["a"]

    def method(self) -> float:
        return self.a

    @classmethod
    def of_class(cls) -> float:
        return cls.kept


class Slots:
    __slots__ = ("a",)


class Dynamic:
    def __init__(self) -> None:
        self.store = {"a": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "store":
            raise AttributeError(name)
        return self.store[name]


@dataclasses.dataclass
class Data:
    a: float = 1.0
    b: list[float] = dataclasses.field(default_factory=lambda: [1.0])


class Level(enum.Enum):
    ONE = 1.0


class Attributes(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Reverse(torch.autograd.Function):
    """Reads a global in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * -W.settings.a


class Pair(NamedTuple):
    a: Any
    b: float


GET = attrgetter("settings.a")
VAR = contextvars.ContextVar("VAR", default=1.0)
LOCAL = threading.local()
SHARED = ctypes.c_double(1.0)


@functools.lru_cache
def remembered() -> float:
    return float(W.number)


class W:
    """Everything that the rows read, made anew by `reset`."""

    number: float
    settings: Settings


def reset() -> None:
    W.number, W.settings, W.slots, W.dynamic = 1.0, Settings(), Slots(), Dynamic()  # type: ignore[attr-defined]
    W.slots.a = 1.0  # type: ignore[attr-defined]
    values: dict[str, Any] = {
        "namespace": argparse.Namespace(a=1.0), "data": Data(), "simple": types.SimpleNamespace(a=1.0),
        "attributes": Attributes(a=1.0), "user": UserDict(a=1.0), "chain": ChainMap({}, {"a": 1.0}),
        "ordered": OrderedDict(a=1.0), "default": defaultdict(lambda: 1.0), "counter": Counter(a=1),
        "deque": deque([1.0]), "array": array.array("d", [1.0]), "numpy": np.ones(3), "pair": Pair(Settings(), 1.0),
        "bytes": bytearray(b"\x01"), "proxy": types.MappingProxyType({"a": W.settings}), "partial": None,
        "tensor": torch.tensor([1.0, 1.0]), "list": [1.0] * 20_000, "names": "a", "set": {"on"}, "cell": [1.0],
        "slope": nn.LeakyReLU(1.0), "group": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
        "sequence": nn.Sequential(nn.Dropout(0.0)), "keys": {("a", 1): 1.0}, "nested": [{"a": ({"b": [1.0]},)}],
    }  # fmt: skip
    for name, value in values.items():
        setattr(W, name, value)
    W.reference = weakref.ref(W.settings)  # type: ignore[attr-defined]
    W.partial = functools.partial(scaled, scale=W.cell)  # type: ignore[attr-defined]
    world.args, world.inner.a, Settings.kept = argparse.Namespace(a=1.0), 1.0, 1.0  # type: ignore[attr-defined]
    sys.modules.update({"tests_world": world, "tests_world.inner": world.inner})
    VAR.set(1.0)
    LOCAL.a, SHARED.value = 1.0, 1.0
    os.environ["TESTS_SCALE"] = "1.0"
    remembered.cache_clear()


def scaled(x: Tensor, scale: list[float]) -> Tensor:
    return x * scale[0]


def imported(x: Tensor) -> Tensor:
    from tests_world import inner  # type: ignore[import-not-found]

    return x * inner.a


def imported_by_name(x: Tensor) -> Tensor:
    return x * importlib.import_module("tests_world").args.a


def caught(x: Tensor) -> Tensor:
    try:
        return x * W.settings.hidden["b"]
    except KeyError:
        return x


def matched(x: Tensor) -> Tensor:
    match W.settings:
        case Settings(a=1.0):
            return x
    return x * 2


def hooked(x: Tensor) -> Tensor:
    h = x * 1.0
    if h.requires_grad:
        h.register_hook(lambda grad: grad * W.settings.a)
    return h


def closure() -> Callable[[Tensor], Tensor]:
    cell = W.cell  # type: ignore[attr-defined]
    return lambda x: x * cell[0]


def put(target: Any, name: str, value: Any = 0.4) -> Callable[[], None]:
    return lambda: setattr(target, name, value)


def keep(call: Callable[[], Any]) -> Callable[[], None]:
    return lambda: call() and None


Way = tuple[Callable[[Tensor], Any], Callable[[], Any]]
A: Any = W
WAYS: dict[str, Way] = {
    "class attribute": (lambda x: x * W.number, put(W, "number")),
    "attribute": (lambda x: x * W.settings.a, lambda: put(W.settings, "a")()),
    "property over a dictionary": (lambda x: x * W.settings.through, lambda: W.settings.hidden.update(a=0.4)),
    "method": (lambda x: x * W.settings.method(), lambda: put(W.settings, "a")()),
    "class method": (lambda x: x * W.settings.of_class(), put(Settings, "kept")),
    "another object": (lambda x: x * W.settings.a, lambda: setattr(W, "settings", copy.copy(A.data))),
    "slots": (lambda x: x * A.slots.a, lambda: put(A.slots, "a")()),
    "own __getattr__": (lambda x: x * A.dynamic.a, lambda: A.dynamic.store.update(a=0.4)),
    "computed name": (lambda x: x * getattr(A.data, A.names), lambda: put(A.data, "a")()),
    "computed name that changes": (lambda x: x * getattr(A.settings, A.names, 0.4), lambda: put(W, "names", "none")()),
    "vars": (lambda x: x * vars(A.data)["a"], lambda: put(A.data, "a")()),
    "globals": (lambda x: x * globals()["W"].number, put(W, "number")),
    "eval": (lambda x: x * eval("W.settings.a"), lambda: put(W.settings, "a")()),
    "attrgetter": (lambda x: x * GET(W), lambda: put(W.settings, "a")()),
    "attrgetter made inside": (lambda x: x * attrgetter("settings.a")(W), lambda: put(W.settings, "a")()),
    "itemgetter": (lambda x: x * itemgetter("a")(A.ordered), lambda: A.ordered.update(a=0.4)),
    "namespace": (lambda x: x * A.namespace.a, lambda: put(A.namespace, "a")()),
    "simple namespace": (lambda x: x * A.simple.a, lambda: put(A.simple, "a")()),
    "namespace in a module": (lambda x: x * world.args.a, lambda: put(world.args, "a")()),
    "module in a module": (lambda x: x * world.inner.a, lambda: put(world.inner, "a")()),
    "import inside": (imported, lambda: put(world.inner, "a")()),
    "import by name": (imported_by_name, lambda: put(world.args, "a")()),
    "sys.modules": (lambda x: x * sys.modules["tests_world"].args.a, lambda: put(world.args, "a")()),
    "data class": (lambda x: x * A.data.b[0], lambda: A.data.b.__setitem__(0, 0.4)),
    "as a dictionary": (lambda x: x * dataclasses.asdict(A.data)["a"], lambda: put(A.data, "a")()),
    "dictionary with attributes": (lambda x: x * A.attributes.a, lambda: A.attributes.update(a=0.4)),
    "user dictionary": (lambda x: x * A.user["a"], lambda: A.user.update(a=0.4)),
    "chain map": (lambda x: x * A.chain["a"], lambda: A.chain.update(a=0.4)),
    "default dictionary": (lambda x: x * A.default["a"], lambda: A.default.update(a=0.4)),
    "counter": (lambda x: x * A.counter["a"], lambda: A.counter.update(a=2)),
    "deque": (lambda x: x * A.deque[0], lambda: A.deque.appendleft(0.4)),
    "tuple as a key": (lambda x: x * A.keys["a", 1], lambda: A.keys.update({("a", 1): 0.4})),
    "nested": (lambda x: x * A.nested[0]["a"][0]["b"][0], lambda: A.nested[0]["a"][0]["b"].__setitem__(0, 0.4)),
    "membership": (lambda x: x if "on" in A.set else x * 2, lambda: A.set.clear()),
    "length": (lambda x: x * len(A.deque), lambda: A.deque.append(1.0)),
    "long list": (lambda x: x * A.list[19_999], lambda: A.list.__setitem__(19_999, 0.4)),
    "named tuple": (lambda x: x * A.pair.a.a, lambda: put(A.pair.a, "a")()),
    "mapping proxy": (lambda x: x * A.proxy["a"].a, lambda: put(W.settings, "a")()),
    "weak reference": (lambda x: x * A.reference().a, lambda: put(W.settings, "a")()),
    "array": (lambda x: x * A.array[0], lambda: A.array.__setitem__(0, 0.4)),
    "bytes": (lambda x: x * A.bytes[0], lambda: A.bytes.__setitem__(0, 2)),
    "numpy": (lambda x: x * float(A.numpy[1]), lambda: A.numpy.__setitem__(1, 0.4)),
    "numpy's sum": (lambda x: x * float(A.numpy.sum()), lambda: A.numpy.__setitem__(1, 0.4)),
    "ctypes": (lambda x: x * SHARED.value, put(SHARED, "value")),
    "environment": (lambda x: x * float(os.environ["TESTS_SCALE"]), lambda: os.environ.update(TESTS_SCALE="0.4")),
    "getenv": (lambda x: x * float(os.getenv("TESTS_SCALE", "1")), lambda: os.environ.update(TESTS_SCALE="0.4")),
    "context variable": (lambda x: x * VAR.get(), lambda: VAR.set(0.4)),
    "thread local": (lambda x: x * LOCAL.a, put(LOCAL, "a")),
    "cache of a function": (lambda x: x * remembered(), lambda: (put(W, "number")(), remembered.cache_clear())),
    "partial": (lambda x: A.partial(x), lambda: A.cell.__setitem__(0, 0.4)),
    "enumeration": (lambda x: x * Level.ONE.value, lambda: object.__setattr__(Level.ONE, "_value_", 0.4)),
    "exception": (caught, lambda: W.settings.hidden.update(b=0.4)),
    "match": (matched, lambda: put(W.settings, "a", 2.0)()),
    "hook of the backward": (hooked, lambda: put(W.settings, "a")()),
    "own backward": (lambda x: Reverse.apply(x), lambda: put(W.settings, "a")()),
    "code": (lambda x: scaled(x, [1.0]), lambda: setattr(scaled, "__code__", (lambda x, scale: x * 2).__code__)),
    "rate of an optimizer": (lambda x: x * A.group.param_groups[0]["lr"], lambda: A.group.param_groups[0].update(lr=2)),
    "global module's slope": (lambda x: A.slope(x), lambda: put(A.slope, "negative_slope")()),
    "global module's mode": (lambda x: A.sequence(x), lambda: put(A.sequence[0], "p", 0.5)()),
    "item": (lambda x: x * A.tensor[0].item(), lambda: A.tensor.fill_(0.4)),
    "item, written past autograd": (lambda x: x * A.tensor[0].item(), lambda: A.tensor.data.fill_(0.4)),
    "item, other memory": (lambda x: x * A.tensor[0].item(), lambda: put(A.tensor, "data", torch.full((2,), 0.4))()),
    "tolist": (lambda x: x * A.tensor.tolist()[1], lambda: A.tensor.mul_(0.4)),
    "to numpy": (lambda x: x * float(A.tensor.numpy()[1]), lambda: A.tensor.mul_(0.4)),
    "float": (lambda x: x * float(A.tensor.sum()), lambda: A.tensor.mul_(0.4)),
    "int": (lambda x: x * int(A.tensor[0] * 3), lambda: A.tensor.mul_(0.4)),
    "branch": (lambda x: x if A.tensor.max() > 0.5 else x * 2, lambda: A.tensor.mul_(0.4)),
    "all": (lambda x: x if bool((A.tensor == 1).all()) else x * 2, lambda: A.tensor.mul_(0.4)),
    "argmax": (lambda x: x * (1 + int(A.tensor.argmax())), lambda: A.tensor[1].fill_(3.0)),
    "attribute of a tensor": (lambda x: x * getattr(A.tensor, "scale", 1.0), lambda: put(A.tensor, "scale")()),
    "iterated": (lambda x: functools.reduce(lambda h, n: h * n, A.deque, x), lambda: A.deque.append(0.4)),
    "zip": (
        lambda x: next(x * a for a, _ in zip(A.deque, itertools.count(), strict=False)),
        lambda: A.deque.appendleft(0.4),
    ),
    "format": (lambda x: x * float(f"{A.settings.a}"), lambda: put(W.settings, "a")()),
}


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between

    def forward(self, x: Tensor) -> Any:
        return self.two(self.between(torch.tanh(self.one(x))))


def outcome(way: Way) -> str:
    """Train beside eager, change the value before the fourth step: "right", "refused", or what went wrong."""
    read, change = way
    torch.manual_seed(0)
    reset()
    code = scaled.__code__
    ours = Net(closure() if read is None else read)
    theirs = copy.deepcopy(ours)
    mine, other = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
    try:
        step = optimize(ours, (x, y), nn.functional.cross_entropy, mine, memory_ratio=1.0, budget=1)
        for number in range(6):
            if number == 3:
                change()
            torch.manual_seed(number)
            loss = step(x, y)
            other.zero_grad()
            torch.manual_seed(number)
            expected = nn.functional.cross_entropy(theirs(x), y)
            expected.backward()
            other.step()
            if not torch.equal(loss, expected.detach()):
                return f"wrong at step {number}"
    except MagisError as error:
        return "refused" if "\n" not in str(error) else f"in several lines: {error}"
    finally:
        scaled.__code__ = code
        object.__setattr__(Level.ONE, "_value_", 1.0)
    return "right"


@pytest.mark.parametrize("name", WAYS)
def test_a_value_that_is_read_is_noticed_when_it_changes(name: str) -> None:
    assert outcome(WAYS[name]) == "right"


def generated(x: Tensor) -> Tensor:
    return x * next(A.endless)


def endless() -> Iterator[float]:
    yield from itertools.count(1.0)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a clock": lambda x: x * time.perf_counter(),
    "a generator": generated,
    "a file": lambda x: x * len(A.stream.name),
    "a number that grows": lambda x: x * A.cell.append(1.0) if A.cell.append(1.0) else x * len(A.cell),
    "an array too large to compare": lambda x: x * float(A.large[0]),
    "a list too long to compare": lambda x: x * A.huge[0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_nobody_can_watch_is_refused(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("1")
    with (tmp_path / "file").open() as stream:
        held = {"stream": stream, "endless": endless(), "large": np.ones(1_000_000), "huge": [1.0] * 200_000}
        for attribute, value in held.items():  # other rows look at all that the class holds
            monkeypatch.setattr(A, attribute, value, raising=False)
        assert outcome((REFUSED[name], lambda: None)) == "refused"


def test_a_closure_and_a_global_of_a_hook_are_part_of_the_world() -> None:
    reset()
    assert outcome((closure(), lambda: A.cell.__setitem__(0, 0.4))) == "right"
