"""Names of the phases of a loop ("training", "evaluation"), told to whatever measures or records it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from magis.current_gate import NAME
from magis.errors import UsageError

__all__ = ["phase", "phases_told"]

Told = Callable[[str], object]


class _Running(threading.local):
    """Running phases of a thread, outermost first, and the functions that are told of changes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.told: list[Told] = []


_RUNNING = _Running()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a phase of a loop: ``with magis.phase("evaluation"): ...``, also a decorator. `magis.peak` around it, and
    `magis.estimate` of a step function that has it, then tell the peak of each phase. The innermost phase counts.
    Without either, nothing happens. Raises UsageError for a name that baselines cannot have."""
    asked: object = name
    if not isinstance(asked, str) or not NAME.fullmatch(asked):
        raise UsageError(
            f"magis.phase: the name is {name!r}", hint="use letters, digits, '_', '-' and '.', 100 at most"
        )
    names = _RUNNING.names
    depth = len(names)
    names.append(name)
    try:
        _tell()
        yield
    finally:
        del names[depth:]
        _tell()


@contextmanager
def phases_told(told: Told) -> Iterator[None]:
    """Call ``told`` with the innermost running phase ("": none) now, and in the block whenever this thread enters or
    leaves one."""
    listening = _RUNNING.told
    listening.append(told)
    try:
        told(_now())
        yield
    finally:
        listening.remove(told)


def _now() -> str:
    return _RUNNING.names[-1] if _RUNNING.names else ""


def _tell() -> None:
    for told in tuple(_RUNNING.told):
        told(_now())
