"""Where in the user's code an operator is called: file and line of the innermost frame that is theirs."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

HERE = Path(__file__).parent
START = str(HERE / "step.py")
"""Calls the module and the loss: frames around it are not theirs."""
NOT_THEIRS = (Path(torch.__file__).parent, HERE, HERE.parent / "aten")
LIBRARY = Path(sysconfig.get_paths()["stdlib"])


class Lines:
    """Looks lines up; remembers which files are the user's, since a step asks some thousand times."""

    def __init__(self) -> None:
        self._theirs: dict[str, str] = {}

    def here(self) -> str:
        """ "net.py:31"; empty where torch was called without any code of theirs in between, as a loss often is."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != START:
            name = frame.f_code.co_filename
            if name not in self._theirs:
                self._theirs[name] = _shown(name)
            if self._theirs[name]:
                return f"{self._theirs[name]}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def _shown(name: str) -> str:
    """A user's file in short: from the current directory on, else with its folder; empty for other files."""
    path = Path(name)
    if name.startswith("<") or any(path.is_relative_to(folder) for folder in NOT_THEIRS):
        return ""
    if path.is_relative_to(LIBRARY) and "site-packages" not in path.parts:
        return ""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return "/".join(path.parts[-2:])
