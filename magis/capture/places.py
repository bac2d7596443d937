"""Origin of an operator: the sub-module whose forward is running, and the user's file and line."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

# Place of an operator call in the user's code: file and line of the innermost user frame.

HERE = Path(__file__).parent
START = frozenset((str(HERE / "captured.py"), str(HERE / "whole_steps.py"), str(HERE.parent / "runtime" / "steps.py")))
"""Files that call module, loss and optimizer: the user's frames lie inside their frames."""
OURS, NETWORKS = HERE.parent, HERE.parent / "models"
LIBRARY = Path(sysconfig.get_paths()["stdlib"])


class UserLines:
    """Look-up of the user's file and line, with a cache of file names, as a step asks some thousand times."""

    def __init__(self) -> None:
        self._theirs: dict[str, str] = {}

    def here(self) -> str:
        """Return file and line of the innermost user frame, such as "net.py:31"; empty if no user code is on the
        stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in START:
            name = frame.f_code.co_filename
            if name not in self._theirs:
                self._theirs[name] = _shown(name)
            if self._theirs[name]:
                return f"{self._theirs[name]}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def _shown(name: str) -> str:
    """Return a user's file name relative to the current directory, else with its folder; empty for other files."""
    path = Path(name)
    if name.startswith("<") or path.is_relative_to(Path(torch.__file__).parent):
        return ""
    if path.is_relative_to(OURS) and not path.is_relative_to(NETWORKS):
        return ""
    if path.is_relative_to(LIBRARY) and "site-packages" not in path.parts:
        return ""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return "/".join(path.parts[-2:])


class Places:
    """Module and line of each operator; operators of the backward get those of the forward operator they belong to."""

    def __init__(self) -> None:
        self._modules: list[str] = [""]
        self._module_of_node: dict[int, str] = {}
        self._lines = UserLines()
        self._line_of_node: dict[int, str] = {}
        self._failure: tuple[int, str] = (0, "")  # id of an error, and the innermost module that raised it

    def of_forward(self, sequence: int) -> tuple[str, str]:
        """Return module and line of the current forward operator, whose autograd node has this sequence number."""
        module, line = self._modules[-1], self._lines.here()
        self._module_of_node.setdefault(sequence, module)
        self._line_of_node.setdefault(sequence, line)
        return module, line

    def of_backward(self, sequence: int) -> tuple[str, str]:
        """Return module and line of the forward operator that made an autograd node."""
        return self._module_of_node.get(sequence, ""), self._line_of_node.get(sequence, "")

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Record the path of the sub-module whose forward is running, while the context lasts. `nn.Module._call_impl`
        is patched, as torch's fused layers are disabled by forward hooks."""
        paths = {id(child): path for path, child in module.named_modules()}
        plain: Any = nn.Module._call_impl

        def watched(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(child))
            if path is None:
                return plain(child, *args, **kwargs)
            self._modules.append(path)
            try:
                return plain(child, *args, **kwargs)
            except BaseException as error:
                if id(error) != self._failure[0]:
                    # Keep the id only: frames would keep tensors alive, and checkpointing ends by an error.
                    self._failure = (id(error), self.module)
                raise
            finally:
                self._modules.pop()

        nn.Module._call_impl = watched  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module._call_impl = plain  # type: ignore[method-assign]

    @property
    def module(self) -> str:
        """Path of the sub-module whose forward is running."""
        return self._modules[-1]

    def module_of(self, error: BaseException) -> str | None:
        """Return the path of the innermost sub-module whose forward raised ``error``, else of the running one; None if
        none is running."""
        if id(error) == self._failure[0]:
            return self._failure[1]
        return self.module if len(self._modules) > 1 else None
