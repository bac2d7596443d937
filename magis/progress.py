"""Progress of work that takes more than two seconds; quicker work prints nothing.

On a terminal it is one line that is rewritten and erased at the end, in a log a line now and then.
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
"""Takes a few words on what the work is doing."""
SILENCE_S = 2.0
REWRITTEN_S, LOGGED_S = 0.5, 10.0
"""Seconds between two lines: of a terminal, and of a log."""
ERASE = "\r\x1b[2K"


@dataclass(eq=False)
class ProgressPlace:
    """Terminal or log on which a process shows progress; all work of the process shares the distance between lines."""

    write: Callable[[str], None]
    columns: int | None = None
    """Width of the terminal; None: a log."""
    column: Callable[[], int] = lambda: 0
    """Returns the characters that others have written on the current line, which they will go on with."""
    last_s: float = -math.inf

    @property
    def between_s(self) -> float:
        return LOGGED_S if self.columns is None else REWRITTEN_S


def on_stderr() -> ProgressPlace:
    """Return stderr as the place where a command shows progress."""
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
    """Yield a function that takes progress of ``name``, and show the last of it whenever a line is due.

    A thread of its own shows it, since slow work reports nothing meanwhile; the thread sleeps nearly all the time.
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
        """Column of the cursor when the line was first shown; None: not shown yet."""
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
