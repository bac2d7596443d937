"""Whose operators those of a step are: the sub-module whose forward is running, and the user's line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from magis.capture.lines import Lines

__all__ = ["Places"]


class Places:
    """Modules and lines as a step goes on; operators of the backward have those of the forward that they belong to."""

    def __init__(self) -> None:
        self._modules: list[str] = [""]
        self._module_of_node: dict[int, str] = {}
        self._lines = Lines()
        self._line_of_node: dict[int, str] = {}
        self._failure: tuple[int, str] = (0, "")  # identity of an error, and the innermost module that it left

    def of_forward(self, sequence: int) -> tuple[str, str]:
        """Module and line of what runs now, which makes the autograd node with this sequence number."""
        module, line = self._modules[-1], self._lines.here()
        self._module_of_node.setdefault(sequence, module)
        self._line_of_node.setdefault(sequence, line)
        return module, line

    def of_backward(self, sequence: int) -> tuple[str, str]:
        """Module and line of what made the node."""
        return self._module_of_node.get(sequence, ""), self._line_of_node.get(sequence, "")

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Note for every operator the path of the sub-module whose forward is running."""
        handles = []
        for path, child in module.named_modules():
            handles.append(child.register_forward_pre_hook(self._enter(path)))
            handles.append(child.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            self._modules.append(path)

        return hook

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        error = sys.exc_info()[1]  # torch calls this hook while an error of the forward passes, too
        if error is not None and id(error) != self._failure[0]:
            # Not the error itself: its frames would keep their tensors, and checkpointing stops by an error.
            self._failure = (id(error), self.module)
        if len(self._modules) > 1:
            self._modules.pop()

    @property
    def module(self) -> str:
        """Path of the sub-module whose forward is running."""
        return self._modules[-1]

    def module_of(self, error: BaseException) -> str:
        """Path of the innermost sub-module whose forward ``error`` has left, else of the one that is running."""
        return self._failure[1] if id(error) == self._failure[0] else self.module
