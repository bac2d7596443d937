"""Reading and setting the state of the generator, as operators that a dispatch mode sees.

torch's Python functions (``torch.get_rng_state``, ``fork_rng``, ``manual_seed``, and through them activation
checkpointing) work on the object ``torch.random.default_generator``. Within ``states_recorded`` another one stands
there, which calls the operators of ``magis.ops.generators``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from magis.errors import CaptureError
from magis.ops.generators import MADE, STATE_BYTES, as_seed, same_generator

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
    """Stands for a device's default generator: what reads or sets its state becomes an operator."""

    device_kind = "cpu"

    def get_state(self) -> Tensor:
        self._check()
        found: Tensor = torch.ops.magis.get_state(STATE_BYTES[self.device_kind], device=torch.device("cpu"))
        return found

    def set_state(self, new_state: Tensor) -> None:  # type: ignore[override]
        self._check()
        torch.ops.magis.set_state(new_state, device=torch.device("cpu"))

    def manual_seed(self, seed: int) -> torch.Generator:
        self._check()
        return self.seeded(seed)

    def seeded(self, seed: int) -> torch.Generator:
        """As ``torch.manual_seed`` does it, for every device."""
        torch.ops.magis.seed(as_seed(seed), device=torch.device("cpu"))
        return self

    def seed(self) -> int:
        raise CaptureError("the step seeds the generator by chance (torch.seed)", hint="use torch.manual_seed")

    def initial_seed(self) -> int:
        raise CaptureError("the step reads the seed of the generator as a number", hint=KEEP)

    def _check(self) -> None:
        """On a GPU its generator is what counts. Only checkpointing keeps that one's state beside the CPU's."""
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_globals.get("__name__") in _AROUND:
            caller = caller.f_back
        name = "" if caller is None else caller.f_globals.get("__name__")
        if self.device_kind != "cpu" and name != _CHECKPOINTING:
            raise CaptureError("the step reads or sets the state of the CPU's generator, but runs on a GPU", hint=KEEP)


class _Generators(type(torch.Generator)):  # type: ignore[misc]
    """Of the class that stands for ``torch.Generator``: generators that were made before are some, too."""

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, _GENERATOR)


_GENERATOR = torch.Generator


class _Made(torch.Generator, metaclass=_Generators):
    """A generator that the step makes: it begins as its seed says, in every step."""

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
    """A context in which states that are read and set are recorded, for a step on ``device`` ("cpu" or "cuda").

    Generators of the step's ``own`` have their methods in C, which nothing can stand in for: CaptureError. Those that
    the step makes are added to ``made``, by name.
    """
    stand_in = _Recorded()
    stand_in.device_kind = device
    makes = type("Generator", (_Made,), {"made": {} if made is None else made})
    replaced: list[tuple[Any, str, Any]] = []
    for place, name, new in (
        (torch, "default_generator", stand_in),
        (torch.random, "default_generator", stand_in),
        (torch.random, "_manual_seed_impl", stand_in.seeded),  # which would seed every GPU now
        (torch, "Generator", makes),
    ):
        replaced.append((place, name, getattr(place, name)))
        setattr(place, name, new)
    before = sys.getprofile()
    if own:
        sys.setprofile(_Refusal(own))
    try:
        yield
    finally:
        if own:
            sys.setprofile(before)
        for place, name, old in replaced:
            setattr(place, name, old)


class _Refusal:
    """Called before every function in C: none of them may handle the states of a step's own generators."""

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
