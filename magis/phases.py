"""Names of the phases of a loop ("training", "evaluation"), told to whatever measures or records it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, TypeVar

from magis.current_gate import NAME
from magis.errors import UsageError

__all__ = ["phase", "phases_told"]

Told = Callable[[str], object]
F = TypeVar("F", bound=Callable[..., Any])


class _Running(threading.local):
    """Running phases of a thread, outermost first, and the functions that are told of changes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.told: list[Told] = []


_RUNNING = _Running()


class NamedPhase(ContextDecorator):
    """A phase of a loop, as a context manager and a decorator."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._depths: list[int] = []

    def __enter__(self) -> None:
        self._depths.append(len(_RUNNING.names))
        _RUNNING.names.append(self._name)
        _tell()

    def __exit__(self, *_error: object) -> None:
        del _RUNNING.names[self._depths.pop() :]
        _tell()

    def __call__(self, func: F) -> F:
        from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction  # slow to import

        if any(kind(func) for kind in (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)):
            raise UsageError(
                f"magis.phase: {getattr(func, '__qualname__', func)} runs piece by piece, between other code",
                hint="name the phase within it, around what runs at once",
            )
        return super().__call__(func)


def phase(name: str) -> NamedPhase:
    """Name a phase of a loop: ``with magis.phase("evaluation"): ...``, also a decorator. `magis.peak` around it, and
    `magis.estimate` of a step function that has it, then tell the peak of each phase. The innermost phase counts.
    Without either, nothing happens. Raises UsageError for a name that baselines cannot have, and as a decorator of a
    generator or coroutine."""
    asked: object = name
    if not isinstance(asked, str) or not NAME.fullmatch(asked):
        told = f"a {type(asked).__name__}" if not isinstance(asked, str) else repr(asked)
        raise UsageError(f"magis.phase: the name is {told}", hint="use letters, digits, '_', '-' and '.', 100 at most")
    return NamedPhase(name)


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
