"""A line that shows what a long case is doing, on a terminal only, and leaves no trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

ERASE = "\r\x1b[2K"
SECONDS_BETWEEN_UPDATES = 0.1


@contextmanager
def progress_line(config: pytest.Config, name: str) -> Iterator[Callable[[str], None] | None]:
    """A function that shows one line of text, None where no terminal would show it. The line is erased at the end."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not reporter.isatty or config.getoption("verbose") < 0:
        yield None
        return
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    last_shown: float | None = None

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            reporter.write(text, flush=True)

    def show(text: str) -> None:
        nonlocal last_shown
        now = time.monotonic()
        if last_shown is None:
            reporter.ensure_newline()
        elif now - last_shown < SECONDS_BETWEEN_UPDATES:
            return
        last_shown = now
        # one column less than the terminal has: a full line would wrap, and could not be erased
        line = " ".join(f"{name}: {text}".split())[: config.get_terminal_writer().fullwidth - 1]
        write(ERASE + line)

    try:
        yield show
    finally:
        if last_shown is not None:
            write(ERASE)
