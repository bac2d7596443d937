"""The generators that Python code on the host draws from: torch's, Python's own and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["HostGenerators", "generators_kept", "seed_all"]


class HostGenerators:
    """The states of Python's and numpy's global generators at one moment."""

    def __init__(self) -> None:
        self._numpy: Any = sys.modules.get("numpy.random")  # which nobody draws from unless it was imported
        self._python = random.getstate()
        self._state = None if self._numpy is None else self._numpy.get_state(legacy=False)

    def moved(self) -> bool:
        """Whether somebody has drawn from them since."""
        if self._python != random.getstate():
            return True
        return self._numpy is not None and repr(self._numpy.get_state(legacy=False)) != repr(self._state)

    def restore(self) -> None:
        """Put the states back."""
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.set_state(self._state)


@contextmanager
def generators_kept() -> Iterator[HostGenerators]:
    """Leave all generators as they are found, torch's for the CPU too."""
    before = HostGenerators()
    with torch.random.fork_rng(devices=[]):
        try:
            yield before
        finally:
            before.restore()


def seed_all(seed: int) -> None:
    """Seed them all."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)
