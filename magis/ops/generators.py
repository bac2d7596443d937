"""Random generators of a step: torch's default ones, those of Python and numpy, and the step's own.

A step's own generators are named by the path to them: an attribute of a module ("decoder.noise"), or a variable of the
forward or the loss function ("loss.noise"). The graph stores the name, which finds the generator in a copy of the
module and after a plan is loaded from a file.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, default_generator, nn
from torch.cuda._utils import _get_device_index

from magis.errors import CaptureError
from magis.ops.python_objects import lasting, walk

_NAME = re.compile(r"[\w.]+", re.ASCII)
"""Pattern of names that are valid in the text form of a graph."""

_SPOKEN = {
    "_modules": "",
    "__func__": "",
    "__kwdefaults__": "",
    "keywords": "",
    "func": "function",
    "args": "arguments",
}
_SPOKEN |= {"__defaults__": "defaults", "__self__": "self"}
"""Words for steps of a path of attributes; "" omits a step."""


def held_generators(module: nn.Module, loss_fn: Callable[..., Any] | None = None) -> dict[str, torch.Generator]:
    """Return the step's own generators by name, which is the shortest path; default generators are left out."""
    found: dict[str, torch.Generator] = {}
    known = {_identity(torch.default_generator)}
    for path, item in walk({"": module, "loss": loss_fn}, lasting):
        if isinstance(item, torch.Generator) and _identity(item) not in known:
            first, *steps = path.split("/")
            words = (_SPOKEN.get(step[1:], step[1:]) for step in steps)
            name = ".".join(word for word in (first, *words) if word)
            if _NAME.fullmatch(name):
                known.add(_identity(item))
                found.setdefault(name, item)
    return found


def same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Return True if both Python objects wrap the same generator: torch makes new wrappers for calls."""
    return _identity(one) == _identity(other)


@contextmanager
def own_kept(generators: Mapping[str, torch.Generator]) -> Iterator[None]:
    """Restore the states of the given generators after the block."""
    before = [(each, each.get_state()) for each in generators.values()]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def _identity(generator: Any) -> int:
    return int(generator._cdata)


# Generators for Python code on the host: torch's CPU generator, Python's and numpy's.


class HostGenerators:
    """Saved states of Python's and numpy's global generators."""

    def __init__(self) -> None:
        self._numpy: Any = sys.modules.get("numpy.random")  # not in use unless it was imported
        self._python = random.getstate()
        self._state = None if self._numpy is None else self._numpy.get_state(legacy=False)

    def moved(self) -> bool:
        """Return True if Python's or numpy's generator has been used since the states were saved."""
        if self._python != random.getstate():
            return True
        return self._numpy is not None and repr(self._numpy.get_state(legacy=False)) != repr(self._state)

    def restore(self) -> None:
        """Restore the saved states."""
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.set_state(self._state)


@contextmanager
def generators_kept() -> Iterator[HostGenerators]:
    """Restore the states of Python's, numpy's and torch's CPU generator after the block."""
    before = HostGenerators()
    with torch.random.fork_rng(devices=[]):
        try:
            yield before
        finally:
            before.restore()


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


# Operators of our own that get and set the state of a device's default generator, and seed a generator.
#
# torch saves and restores states by plain Python calls (for recomputation in activation checkpointing, say), which a
# dispatch mode does not see. As operators, they are ordered in the graph with operators that draw random numbers:
#
#     %s = magis.get_state(5056, device=<device cpu>)    the state, as a tensor
#     magis.set_state(%s, device=<device cpu>)           restores the state
#     magis.seed(3, device=<device cpu>)                 ``torch.manual_seed(3)``
#     magis.seed_made(3, generator=<generator .made.0>)  ``manual_seed(3)`` of a generator that the step makes
#     %s = magis.draw_state(5056, device=<device cpu>)   the state of a new generator, seeded from the default one

GET_STATE, SET_STATE, SEED = "magis.get_state.default", "magis.set_state.default", "magis.seed.default"
DRAW_STATE = "magis.draw_state.default"
SEED_MADE = "magis.seed_made.default"
STATE_OPERATORS = frozenset((GET_STATE, SET_STATE, SEED, DRAW_STATE, SEED_MADE))
MADE = ".made."
"""Prefix of the names of generators that the step makes; other names do not begin with a dot."""
STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""Bytes of a generator's state by device type; the state tensor is on the CPU for every device."""

_BITS = 64


def generator_of(device: torch.device | str) -> torch.Generator:
    """Return the default generator of a device."""
    where = torch.device(device)
    if where.type != "cuda":
        return default_generator
    torch.cuda.init()  # makes the generators
    return torch.cuda.default_generators[_get_device_index(where, optional=True)]


def as_seed(seed: int) -> int:
    """Return a torch seed (up to 64 bits) as a signed 64-bit integer. Raises ValueError for more bits."""
    given = int(seed)
    if not -(2 ** (_BITS - 1)) <= given < 2**_BITS:
        raise ValueError(f"a seed of more than {_BITS} bits: {given}")
    return given if given < 2 ** (_BITS - 1) else given - 2**_BITS


def _get_state(nbytes: int, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return generator_of(device).get_state()


_OFFSETS = 4
"""Philox offset by which a CUDA generator advances when each thread draws one number."""


def _draw_state(nbytes: int, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    drawn = generator_of(device)
    made = torch.Generator(drawn.device)
    if device.type == "cuda":  # seeded from the offset: reading a random number back would synchronize with the GPU
        seed = hash((drawn.initial_seed(), drawn.get_offset())) % 2**_BITS
        drawn.set_offset(drawn.get_offset() + _OFFSETS)
    else:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=drawn))
    made.manual_seed(seed)
    return made.get_state()


def _set_state(state: Tensor, device: torch.device) -> None:
    generator_of(device).set_state(state)


def _seed(seed: int, device: torch.device) -> None:  # noqa: ARG001  (of all devices)
    if not torch.cuda._is_in_bad_fork():
        torch.cuda.manual_seed_all(seed % 2**_BITS)
    default_generator.manual_seed(seed % 2**_BITS)


def _seed_made(seed: int, generator: torch.Generator) -> None:
    generator.manual_seed(seed % 2**_BITS)


@contextmanager
def drawing_apart(device: torch.device) -> Iterator[None]:
    """Draw the block's random numbers from a new generator, seeded from the device's default generator.

    After the block, the default generator continues as if it had drawn only that seed. A capture records all of this.
    """
    kind = getattr(torch.default_generator, "device_kind", device.type)
    apart: Tensor = torch.ops.magis.draw_state(STATE_BYTES[kind], device=device)
    kept: Tensor = torch.ops.magis.get_state(STATE_BYTES[kind], device=device)
    torch.ops.magis.set_state(apart, device=device)
    del apart
    try:
        yield
    finally:
        torch.ops.magis.set_state(kept, device=device)


_LIBRARY = torch.library.Library("magis", "FRAGMENT")
_LIBRARY.define("get_state(int nbytes, *, Device device) -> Tensor")
_LIBRARY.define("draw_state(int nbytes, *, Device device) -> Tensor")
_LIBRARY.define("set_state(Tensor state, *, Device device) -> ()")
_LIBRARY.define("seed(int seed, *, Device device) -> ()")
_LIBRARY.define("seed_made(int seed, *, Generator generator) -> ()")
_LIBRARY.impl("get_state", _get_state, "BackendSelect")
_LIBRARY.impl("draw_state", _draw_state, "BackendSelect")
_LIBRARY.impl("set_state", _set_state, "CPU")
_LIBRARY.impl("set_state", lambda *_, **__: None, "Meta")  # meta tensors hold no state
_LIBRARY.impl("seed", _seed, "BackendSelect")
_LIBRARY.impl("seed_made", _seed_made, "BackendSelect")


# Recording of reads and writes of generator states. torch's Python functions (`torch.get_rng_state`, `fork_rng`,
# `manual_seed`, and so activation checkpointing) use the object `torch.random.default_generator`. `states_recorded`
# replaces it by one that calls the operators above.

_STATES = frozenset(
    {
        "get_state", "set_state", "manual_seed", "seed", "initial_seed", "clone_state", "get_offset", "set_offset",
        "graphsafe_get_state", "graphsafe_set_state",
    }
)  # fmt: skip
_CHECKPOINTING = "torch.utils.checkpoint"
_AROUND = ("torch.random", "torch", "contextlib", __name__)
KEEP = "draw what the step needs before it, and pass it as an input"


class _Recorded(torch.Generator):
    """Replacement of the default generator that gets and sets the state through operators."""

    device_kind = "cpu"

    def get_state(self) -> Tensor:
        self._refuse_on_gpu()
        found: Tensor = torch.ops.magis.get_state(STATE_BYTES[self.device_kind], device=torch.device("cpu"))
        return found

    def set_state(self, new_state: Tensor) -> None:  # type: ignore[override]
        self._refuse_on_gpu()
        torch.ops.magis.set_state(new_state, device=torch.device("cpu"))

    def manual_seed(self, seed: int) -> torch.Generator:
        self._refuse_on_gpu()
        return self.seeded(seed)

    def seeded(self, seed: int) -> torch.Generator:
        """Seed the generators of all devices and return the generator, as ``torch.manual_seed`` does."""
        torch.ops.magis.seed(as_seed(seed), device=torch.device("cpu"))
        return self

    def seed(self) -> int:
        raise CaptureError("the step seeds the generator by chance (torch.seed)", hint="use torch.manual_seed")

    def initial_seed(self) -> int:
        raise CaptureError("the step reads the seed of the generator as a number", hint=KEEP)

    def _refuse_on_gpu(self) -> None:
        """Raise CaptureError for a use of the CPU's state in a step on a GPU, except by activation checkpointing."""
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_globals.get("__name__") in _AROUND:
            caller = caller.f_back
        name = "" if caller is None else caller.f_globals.get("__name__")
        if self.device_kind != "cpu" and name != _CHECKPOINTING:
            raise CaptureError("the step reads or sets the state of the CPU's generator, but runs on a GPU", hint=KEEP)


class _Generators(type(torch.Generator)):  # type: ignore[misc]
    """Metaclass of the replacement of ``torch.Generator``, for which every real generator is an instance."""

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, _GENERATOR)


_GENERATOR = torch.Generator


class _Made(torch.Generator, metaclass=_Generators):
    """A generator that the step makes, seeded alike in every step."""

    made: dict[str, torch.Generator]

    def __init__(self, device: Any = None) -> None:  # noqa: ARG002 (taken by `__new__`)
        self.made[f"{MADE}{len(self.made)}"] = self
        self._begin(super().initial_seed())

    def _begin(self, seed: int) -> None:
        torch.ops.magis.seed_made(as_seed(seed), generator=self)

    def manual_seed(self, seed: int) -> torch.Generator:
        self._begin(seed)
        return self

    def seed(self) -> int:
        raise CaptureError("the step seeds a generator by chance", hint="use manual_seed")

    def initial_seed(self) -> int:
        raise CaptureError("the step reads the seed of a generator that it makes", hint=KEEP)

    def get_state(self) -> Tensor:
        raise CaptureError("the step reads the state of a generator that it makes", hint=KEEP)

    def set_state(self, new_state: Tensor) -> None:  # type: ignore[override]  # noqa: ARG002
        raise CaptureError("the step sets the state of a generator that it makes", hint="use manual_seed")

    clone_state = graphsafe_get_state = get_state  # type: ignore[assignment]
    graphsafe_set_state = set_offset = set_state  # type: ignore[assignment]


@contextmanager
def states_recorded(
    device: str, own: Mapping[str, torch.Generator], made: dict[str, torch.Generator] | None = None
) -> Iterator[None]:
    """Record reads and writes of generator states in the block as operators, for a step on ``device`` ("cpu", "cuda").

    Raises CaptureError for the states of the step's ``own`` generators, whose C methods cannot be patched. Generators
    that the step makes are added to ``made``, by name.
    """
    stand_in = _Recorded()
    stand_in.device_kind = device
    makes = type("Generator", (_Made,), {"made": {} if made is None else made})
    replaced: list[tuple[Any, str, Any]] = []
    for place, name, new in (
        (torch, "default_generator", stand_in),
        (torch.random, "default_generator", stand_in),
        (torch.random, "_manual_seed_impl", stand_in.seeded),  # torch's own would seed every GPU at once
        (torch, "Generator", makes),
    ):
        replaced.append((place, name, getattr(place, name)))
        setattr(place, name, new)
    try:
        with called_first(_Refusal(own)) if own else nullcontext():
            yield
    finally:
        for place, name, old in replaced:
            setattr(place, name, old)


@contextmanager
def called_first(call: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call a function before every Python and C call in the block, as a profiler; a running profiler is suspended."""
    before: Any = sys.getprofile()
    sys.setprofile(call)
    try:
        yield
    finally:
        if hasattr(before, "enable"):  # cProfile's: no function
            before.enable()
        else:
            sys.setprofile(before)


class _Refusal:
    """Profile function that raises CaptureError for C calls that get or set the state of a step's own generator."""

    def __init__(self, own: Mapping[str, torch.Generator]) -> None:
        self._own = tuple(own.values())

    def __call__(self, _frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or getattr(called, "__name__", "") not in _STATES:
            return
        given = getattr(called, "__self__", None)
        if isinstance(given, torch.Generator) and any(same_generator(given, each) for each in self._own):
            raise CaptureError(
                f"the step calls {called.__name__} of a generator of its own", hint="set its state before the step"
            )
