"""Values that no path leads to: what only running code reaches is noticed, or refused in one line."""

# ruff: noqa: PLW0108, DTZ005, DTZ011  (every row says by itself what it reads and what changes)
from __future__ import annotations

import builtins
import contextlib
import dataclasses
import datetime as dt
import decimal
import functools
import itertools
import logging
import os
import resource
import sqlite3
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from magis import MagisError, optimize
from tests.training.test_reads import A, Settings, W, Way, keep, outcome, put, reset

DEADLINE = time.monotonic() + 1e6
MOST = 25_000_000
DAY = datetime.now() + dt.timedelta(days=100)


class Patched(Settings):
    pass


class Descriptor:
    def __get__(self, item: object, kind: type) -> float:
        return W.cell[0]  # type: ignore[attr-defined, no-any-return]


@dataclasses.dataclass
class Fields:
    a: float = 1.0


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a


@torch.library.custom_op("tests_reads::same", mutates_args=())
def same_as(x: Tensor) -> Tensor:
    return x.clone()


same_as.register_fake(torch.empty_like)


def made(**parts: Any) -> Any:
    """An object of a new class with these attributes and methods."""
    return type("Made", (parts.pop("base", object),), parts)()


def special(name: str, value: float, result: Callable[[list[float]], Any], read: Callable[[Any], Any]) -> Way:
    """A method that Python calls by itself, and whose values no path but that of its class leads to."""
    cell = [1.0]
    item = made(**{name: lambda *_: result(cell)})
    return lambda x: x * read(item), lambda: cell.__setitem__(0, value)


def opened(read: Callable[[Any], float], change: Callable[[Any], Any], item: Any) -> Way:
    """A way through an object that is made anew for every test."""
    return lambda x: x * read(item), lambda: change(item)


def import_that_fails(x: Tensor) -> Tensor:
    try:
        import tests_absent
    except ImportError:
        return x
    return x * tests_absent.a  # type: ignore[no-any-return]


def differentiated() -> Way:
    cell = [1.0]
    same_as.register_autograd(lambda _, grad: grad * cell[0])
    return lambda x: same_as(x), lambda: cell.__setitem__(0, 0.4)


def differentiated_anew() -> Way:
    same_as.register_autograd(lambda _, grad: grad)
    return lambda x: same_as(x), lambda: same_as.register_autograd(lambda _, grad: grad * 0.4)


def of_subclass() -> Way:
    class Own(Tensor):
        k = 1.0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_function__(func, types, args, kwargs or {})
            return out.as_subclass(Tensor) * cls.k if func is torch.Tensor.mul else out

    one = torch.ones(1).as_subclass(Own)
    return lambda x: x * torch.Tensor.mul(one, 1.0)[0], put(Own, "k")


def held_weakly() -> Way:
    kept = [Settings()]
    known = weakref.WeakSet(kept)
    return lambda x: x * (1.0 if len(known) else 0.4), kept.clear


def with_a_factory() -> Way:
    cell = [1.0]
    kind = dataclasses.make_dataclass("kind", [("a", float, dataclasses.field(default_factory=lambda: cell[0]))])
    return lambda x: x * kind().a, lambda: cell.__setitem__(0, 0.4)


def based() -> Way:
    one, other = (type("Base", (Settings,), {"kept": a}) for a in (1.0, 0.4))
    kind: Any = type("Kind", (one,), {})
    return lambda x: x * kind.kept, put(kind, "__bases__", (other,))


class Timer:
    """Seconds and calls, as a training script keeps them."""

    def __init__(self) -> None:
        self.begun, self.total, self.calls = 0.0, 0.0, 0

    def __enter__(self) -> None:
        self.begun = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.calls += 1
        self.total += perf_counter() - self.begun
        if self.calls % 2 == 0:
            log("%s calls, %.1f a second", self.calls, self.calls / (self.total + 1e-9))  # of a coarse clock


def log(*given: Any) -> None:
    logging.getLogger("tests").debug(*given)


def timed() -> Callable[[Tensor], Any]:
    timer = Timer()

    def read(x: Tensor) -> Tensor:
        with timer:
            return x * 1.0

    return read


class DrawnByHand:
    """Large numbers of one's own, beside a clock."""

    def __init__(self) -> None:
        self.number = 1

    def __call__(self, x: Tensor) -> Tensor:
        self.number = (self.number * 1103515245 + 12345) % 2**31
        log("%s", perf_counter())
        return x * (1.0 + self.number % 3)


def masked() -> Callable[[Tensor], Any]:
    mask = functools.lru_cache(lambda size: torch.ones(size, size).tril())
    return lambda x: x @ mask(x.shape[-1])


def written(x: Tensor) -> Tensor:
    with open(os.devnull, "a") as file:  # noqa: PTH123
        file.write(f"{datetime.now():%H:%M} {x.shape}")
    return x


IDLE: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "a clock": lambda: lambda x: x * 1.0 if log("%s", time.perf_counter()) else x,
    "a clock of one's own": lambda: lambda x: x * 1.0 if log("%s", perf_counter()) else x,
    "seconds that have passed": timed,
    "a clock beside numbers": DrawnByHand,
    "the time of day": lambda: lambda x: x * 1.0 if log(time.strftime("%H:%M:%S"), time.ctime()) else x,
    "a date": lambda: lambda x: x * 1.0 if log(datetime.now().isoformat(), dt.date.today()) else x,
    "memory of the process": lambda: lambda x: x * 1.0 if log(resource.getrusage(resource.RUSAGE_SELF)) else x,
    "an address": lambda: lambda x: {id(x): x * 1.0}[id(x)],
    "a file that is written": lambda: written,
}


@pytest.mark.filterwarnings("ignore:.*keeps results of the step that was planned")
@pytest.mark.parametrize("name", IDLE)
def test_what_a_log_tells_is_no_reason_to_refuse(name: str) -> None:
    assert outcome((IDLE[name](), lambda: None)) == "right"


@pytest.mark.parametrize("name", ["time", "monotonic_ns", "perf_counter"])
def test_other_threads_and_logs_have_the_time_as_it_is(name: str, caplog: Any) -> None:
    """A watchdog beside the training would take a year for a hang."""
    clock, unit, seen, over = (
        getattr(time, name),
        1e9 if name.endswith("_ns") else 1.0,
        list[float](),
        threading.Event(),
    )
    logger = logging.getLogger("tests.times")

    def watch() -> None:
        while not over.wait(0.0005):
            seen.append(getattr(time, name)() / unit)

    def forward(x: Tensor) -> Tensor:
        logger.warning("a record")
        time.sleep(0.01)  # the other thread looks at the clock
        log("a clock that nothing is computed with: %s", time.perf_counter())
        return x

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        outcome((forward, lambda: None))
    finally:
        over.set()
        thread.join()
    assert seen
    assert max(seen) <= clock() / unit
    times = [each.created for each in caplog.records if each.name == logger.name]
    assert times
    assert max(times) <= time.time()


def decorated() -> Way:
    factor = [1.0]

    @contextlib.contextmanager
    def block(held: list[float]) -> Iterator[None]:
        held.append(1.0)
        yield
        held.pop()

    @block(factor)
    def scaled(x: Tensor) -> Tensor:
        return x * factor[0]

    return scaled, lambda: factor.__setitem__(0, 0.4)


FRESH: dict[str, Callable[[], Way]] = {
    "a function under a context manager's decorator": decorated,
    "method patched onto a subclass": lambda: (
        lambda x: x * Patched().method(), put(Patched, "method", lambda self: self.a * 0.4)),
    "__len__": lambda: special("__len__", 2, lambda cell: int(cell[0]), len),
    "__bool__": lambda: special("__bool__", 0, lambda cell: bool(cell[0]), lambda item: 1 if item else 2),
    "__float__": lambda: special("__float__", 0.4, lambda cell: cell[0], float),
    "__iter__": lambda: special("__iter__", 0.4, iter, sum),
    "descriptor": lambda: opened(lambda item: item.a, lambda _: A.cell.__setitem__(0, 0.4), made(a=Descriptor())),
    "metaclass": lambda: opened(
        lambda kind: kind.a, lambda kind: setattr(type(kind), "a", 0.4), type("M", (type,), {"a": 1.0})("K", (), {})),
    "bases": based,
    "default factory": with_a_factory,
    "field of a data class": lambda: (
        lambda x: x * dataclasses.fields(Fields)[0].default, lambda: put(dataclasses.fields(Fields)[0], "default")()),
    "attribute of a subclass of tensors": of_subclass,
    "attribute of a scripted module": lambda: opened(
        lambda item: item(torch.ones(())), lambda item: setattr(item, "a", 0.4), torch.jit.script(Scripted())),
    "backward of a custom operator": differentiated,
    "another backward": differentiated_anew,
    "weak set": held_weakly,
    "view of a dictionary": lambda: opened(
        lambda view: next(iter(view)), lambda _: A.ordered.update(a=0.4), A.ordered.values()),
    "arguments of an exception": lambda: opened(
        lambda error: error.args[0], lambda error: put(error, "args", (0.4,))(), ValueError(1.0)),
    "state of a partial": lambda: opened(
        lambda p: p(), lambda p: p.__setstate__((float, (0.4,), {}, {})), functools.partial(float, 1.0)),
    "gradient of another tensor": lambda: opened(
        lambda one: 1.0 if one.grad is None else 0.4, lambda one: put(one, "grad", torch.ones(1))(),
        torch.zeros(1, requires_grad=True)),
    "a tensor in a cache of a closure": lambda: (masked(), lambda: None),
    "built-in name": lambda: (lambda x: x * tests_name, put(builtins, "tests_name")),  # noqa: F821
    "import that fails": lambda: (
        import_that_fails, lambda: sys.modules.update(tests_absent=types.SimpleNamespace(a=0.4))),  # type: ignore[arg-type]
    "sys.argv": lambda: (lambda x: x * len(sys.argv), lambda: sys.argv.append("one")),
    "anomaly mode": lambda: (lambda x: x * (1.0 if torch.is_anomaly_enabled() else 0.4),
                                 lambda: keep(lambda: torch.autograd.set_detect_anomaly(True))()),
    "level of a logger": lambda: (
        lambda x: x * (1.0 if logging.getLogger("tests").isEnabledFor(10) else 0.4),
        lambda: logging.getLogger("tests").setLevel(10)),
    "precision of decimals": lambda: (
        lambda x: x * float(Decimal(2) / 3), lambda: put(decimal.getcontext(), "prec", 2)()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", FRESH)
def test_a_value_that_only_running_code_leads_to_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, names in ((builtins, {"tests_name": 1.0}), (sys, {"argv": ["one"]})):
        for each, value in names.items():
            monkeypatch.setattr(place, each, value, raising=False)
    monkeypatch.delitem(sys.modules, "tests_absent", raising=False)
    reset()
    way = FRESH[name]()
    with decimal.localcontext():
        try:
            assert outcome(way) == "right"
        finally:
            torch.autograd.set_detect_anomaly(False)
            logging.getLogger("tests").setLevel(0)
            sys.modules.pop("tests_absent", None)


def keeping(x: Tensor, timer: Timer = Timer()) -> Tensor:  # noqa: B008 (the one of all steps)
    out = x if timer.begun < DEADLINE else x * 2
    timer.begun = time.monotonic()
    return out


def opened_file(_: Tensor) -> float:
    with open(A.path) as file:  # noqa: PTH123
        return float(file.read())


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a file that is opened": lambda x: x * opened_file(x),
    "a file that is looked for": lambda x: x * (1.0 if os.path.exists(A.path) else 0.4),  # noqa: PTH110
    "a table": lambda x: x * A.table.execute("select 1.0").fetchone()[0],
    "a cycle": lambda x: x * next(A.cycle),
    "a branch on a clock": lambda x: x if time.monotonic() < DEADLINE else x * 2,
    "a branch on a clock of one's own": lambda x: x if perf_counter() < DEADLINE else x * 2,
    "a branch on seconds that have passed": lambda x: x if -perf_counter() + perf_counter() < 60 else x * 2,
    "a branch on a date": lambda x: x if datetime.now() < DAY else x * 2,
    "a branch on a module's date": lambda x: x if dt.date.today() < DAY.date() else x * 2,
    "a time that the step keeps": keeping,
    "the year": lambda x: x * (int(time.strftime("%Y")) / 2000),
    "the hour": lambda x: x * (time.localtime().tm_year / 2000),
    "a clock that nobody can put forward": lambda x: x if A.clock() < DEADLINE else x * 2,
    "memory of the process": lambda x: x if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < MOST else x * 2,
    "an address": lambda x: x if id(A.thing) == A.address else x * 2,
    "a hash of an address": lambda x: x if hash(A.thing) == A.hashed else x * 2,
    "an address among others": lambda x: x * {A.address: 1.0}[id(A.thing)],
    "a lock": lambda x: x * (1.0 if A.lock.locked() else 0.4),
    "the version of a tensor": lambda x: x * (1.0 + A.tensor._version),
    "the state of an optimizer": lambda x: x * (1.0 + len(A.group.state)),
    "an object that tells nothing": lambda x: x * A.opaque.v,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_nobody_can_watch_is_refused(name: str, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("1")
    A.path, A.cycle, A.lock = str(tmp_path / "file"), itertools.cycle([1.0, 1.0, 0.4]), threading.Lock()
    A.clock, A.thing = time.monotonic, object()
    A.address, A.hashed = id(A.thing), hash(A.thing)
    A.table, A.opaque = sqlite3.connect(":memory:"), made(__getattribute__=lambda _, name: {"v": 1.0}[name])
    try:
        assert outcome((REFUSED[name], lambda: None)) == "refused"
    finally:
        A.table.close()
        for name_of in (
            "path",
            "cycle",
            "lock",
            "table",
            "opaque",
            "clock",
            "address",
        ):  # others look at all that A has
            delattr(A, name_of)


class Halved(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is torch.tanh else out


def test_a_mode_around_the_step_is_refused() -> None:
    mode = Halved()
    try:
        assert outcome((lambda x: x, lambda: keep(mode.__enter__)())) == "refused"
    finally:
        mode.__exit__(None, None, None)


def test_a_loss_that_reads_its_optimizer_is_refused() -> None:
    model = nn.Linear(6, 3)
    adam = torch.optim.AdamW(model.parameters())

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, y) * (1.0 + len(adam.state))

    with pytest.raises(MagisError, match="state, and nobody sees when that changes"):
        optimize(model, (torch.randn(5, 6), torch.randint(0, 3, (5,))), loss_of, adam, memory_ratio=1.0, budget=1)
