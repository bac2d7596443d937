"""Progress messages for work that takes more than two seconds.

On a terminal, one line is rewritten and erased at the end; in a log, a line is added every ten seconds at most.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import TypeAlias

from magis.printable import printable

__all__ = ["ERASE", "Progress", "ProgressPlace", "on_stderr", "shown_if_slow"]

Progress: TypeAlias = Callable[[str], None]
"""Callback that takes a short text about the current progress."""
SILENCE_S = 2.0
REWRITTEN_S, LOGGED_S = 0.5, 10.0
"""Minimum seconds between two messages: on a terminal, and in a log."""
ERASE = "\r\x1b[2K"


@dataclass(eq=False)
class ProgressPlace:
    """Terminal or log for progress messages; the minimum time between messages holds for the whole process."""

    write: Callable[[str], None]
    columns: int | None = None
    """Width of the terminal in characters; None for a log."""
    column: Callable[[], int] = lambda: 0
    """Callback that returns the column at which other output has left the cursor."""
    last_s: float = -math.inf

    @property
    def between_s(self) -> float:
        return LOGGED_S if self.columns is None else REWRITTEN_S


def on_stderr() -> ProgressPlace:
    """Return stderr as the place for progress messages."""
    stream = sys.stderr

    def write(text: str) -> None:
        if stream is not None:
            with suppress(OSError, ValueError):  # nobody listens any more
                stream.write(text)
                stream.flush()

    is_terminal = stream is not None and stream.isatty()  # None: closed when the process began
    return ProgressPlace(write, shutil.get_terminal_size().columns if is_terminal else None)


@contextmanager
def shown_if_slow(place: ProgressPlace, name: str) -> Iterator[Progress]:
    """Yield a callback that takes progress of ``name``; the latest text is printed once two seconds have passed.

    A background thread prints, since slow work may not call back for a long time.
    """
    work = _SlowWork(place, name)
    try:
        yield work.tell
    finally:
        work.end()


class _SlowWork:
    def __init__(self, place: ProgressPlace, name: str) -> None:
        self._place, self._name, self._text = place, printable(name), ""
        self._started = time.monotonic()
        self._due = self._started + SILENCE_S
        if place.columns is None:
            self._due = max(self._due, place.last_s + place.between_s)
        self._column: int | None = None
        """Column of the cursor when the line was first printed; None: nothing printed yet."""
        self._lock, self._over = Lock(), Event()
        self._thread: Thread | None = None

    def tell(self, text: str) -> None:
        with self._lock:
            self._text = " ".join(printable(text).split())
            self._show()
        if self._thread is None:
            self._thread = Thread(target=self._watch, name="magis progress", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(max(0.1, self._due - time.monotonic())):
            with self._lock:
                if not self._over.is_set():
                    self._show()

    def end(self) -> None:
        with self._lock:
            self._over.set()
            if self._column is not None and self._place.columns is not None:
                up = f"\x1b[A\x1b[{self._column}C" if self._column else ""
                self._place.write(f"{ERASE}{up}")
        if self._thread is not None and self._thread.is_alive():  # not where an interrupt cut its start short
            self._thread.join(1.0)  # one that hangs in a blocked pipe is left behind

    def _show(self) -> None:
        now, place = time.monotonic(), self._place
        if now < self._due:
            return
        place.last_s, self._due = now, now + place.between_s
        line = f"{self._name}: {self._text} ({now - self._started:.0f} s)"
        first = self._column is None
        if first:
            self._column = place.column() % (place.columns or sys.maxsize)
        start = "\n" if first and self._column else ""
        if place.columns is None:
            place.write(f"{start}magis: {line}\n")
            return
        # one column less than there are: a full line would wrap, and could not be erased
        columns = place.columns - 1
        if (over := len(line) - columns) > 0:
            # cut the beginning of the name: the progress behind it is news, the name is not
            line = f"...{line[min(over + 3, len(self._name)) :]}"[:columns]
        place.write(f"{start}{ERASE}{line}")
