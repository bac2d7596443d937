"""Lines of JSON out of pieces of bytes, and one line out of what a dying process printed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Lines", "last_words", "stack"]

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_LONGEST = 300
_NOISE = "USDT:"
"""The profiler's own lines."""


@dataclass
class Lines:
    """Collects bytes as they come and gives the messages of the lines that are whole."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that ``data`` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole if line]


def last_words(text: str) -> str:
    """The line that says most of what a process printed before it died: the last one; empty where it printed none."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    return lines[-1][:_LONGEST] if lines else ""


def stack(text: str) -> list[str]:
    """The frames ("/path/file.py:12 in name", innermost first) in what `faulthandler` wrote."""
    _, _, last = text.rpartition("Current thread")
    return [f"{found['file']}:{found['line']} in {found['name']}" for found in _FRAME.finditer(last)]
