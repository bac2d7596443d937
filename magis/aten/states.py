"""Operators of our own that read and set the state of a device's default generator, and seed one that a step makes.

torch saves and restores states with plain Python calls, around what activation checkpointing repeats say, which no
dispatch mode sees. As operators they stand in a graph, in their order with those that draw random numbers:

    %s = magis.get_state(5056, device=<device cpu>)    the state, as a tensor
    magis.set_state(%s, device=<device cpu>)           puts it back
    magis.seed(3, device=<device cpu>)                 what ``torch.manual_seed(3)`` does
    magis.seed_made(3, generator=<generator .made.0>)  the same for a generator that is made within the step
"""

from __future__ import annotations

import torch
from torch import Tensor, default_generator
from torch.cuda._utils import _get_device_index

__all__ = ["GET_STATE", "MADE", "SEED", "SEED_MADE", "SET_STATE", "STATE_BYTES", "as_seed", "generator_of"]

GET_STATE, SET_STATE, SEED = "magis.get_state.default", "magis.set_state.default", "magis.seed.default"
SEED_MADE = "magis.seed_made.default"
MADE = ".made."
"""Begins the names of generators that are made within the step; where others are held never begins with a dot."""
STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""What a state takes, in host memory whatever the device."""

_BITS = 64


def generator_of(device: torch.device | str) -> torch.Generator:
    """The default generator of a device."""
    where = torch.device(device)
    if where.type != "cuda":
        return default_generator
    torch.cuda.init()  # makes the generators
    return torch.cuda.default_generators[_get_device_index(where, optional=True)]


def as_seed(seed: int) -> int:
    """A seed, as torch takes it, as a whole number of 64 bits with sign, as operators take it."""
    given = int(seed)
    if not -(2 ** (_BITS - 1)) <= given < 2**_BITS:
        raise ValueError(f"a seed of more than {_BITS} bits: {given}")
    return given if given < 2 ** (_BITS - 1) else given - 2**_BITS


def _get_state(nbytes: int, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return generator_of(device).get_state()


def _set_state(state: Tensor, device: torch.device) -> None:
    generator_of(device).set_state(state)


def _seed(seed: int, device: torch.device) -> None:  # noqa: ARG001  (of all devices)
    if not torch.cuda._is_in_bad_fork():
        torch.cuda.manual_seed_all(seed % 2**_BITS)
    default_generator.manual_seed(seed % 2**_BITS)


def _seed_made(seed: int, generator: torch.Generator) -> None:
    generator.manual_seed(seed % 2**_BITS)


def _nothing(state: Tensor, device: torch.device) -> None:
    """Memory without contents holds no state."""


_LIBRARY = torch.library.Library("magis", "FRAGMENT")
_LIBRARY.define("get_state(int nbytes, *, Device device) -> Tensor")
_LIBRARY.define("set_state(Tensor state, *, Device device) -> ()")
_LIBRARY.define("seed(int seed, *, Device device) -> ()")
_LIBRARY.define("seed_made(int seed, *, Generator generator) -> ()")
_LIBRARY.impl("get_state", _get_state, "BackendSelect")
_LIBRARY.impl("set_state", _set_state, "CPU")
_LIBRARY.impl("set_state", _nothing, "Meta")
_LIBRARY.impl("seed", _seed, "BackendSelect")
_LIBRARY.impl("seed_made", _seed_made, "BackendSelect")
