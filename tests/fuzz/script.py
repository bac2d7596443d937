"""A training loop as a few lines of source: what generators draw, judges run, shrinking shortens and failures print.

A script is text in sections, each a list of statements. `source` joins them into a program that runs by itself with
either step; `namespace` executes it. Eager mode and `magis.optimize` run the very same text: only the function `step`,
which the events call, is another one.
"""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["LISTS", "Script", "namespace", "source"]

IMPORTS = """\
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
"""


@dataclass(frozen=True)
class Script:
    """The sections of a training loop. Every item of a list is one statement, perhaps of several lines."""

    prelude: tuple[str, ...] = ()
    """Classes and constants that the rest refers to."""
    init: tuple[str, ...] = ()
    """Of `Net.__init__`; without it and `forward` there is no class Net, and `setup` makes the model."""
    forward: tuple[str, ...] = ()
    takes: tuple[str, ...] = ("x0",)
    """Arguments of `Net.forward`."""
    result: str = ""
    """What `Net.forward` returns."""
    setup: tuple[str, ...] = ()
    """After `torch.manual_seed(0)`: makes `model`, and whatever else the loop needs but the optimizer."""
    optimizer: tuple[str, ...] = ()
    """Makes `optimizer` (None: the loop itself updates)."""
    batch: tuple[str, ...] = ()
    """Of `batch(seed, **how)`, after `torch.manual_seed(seed)`."""
    inputs: tuple[str, ...] = ("x0",)
    targets: tuple[str, ...] = ("t0",)
    loss: str = "F.mse_loss(out, t0)"
    """An expression of `out` and the targets."""
    how: str = ""
    """Further parameters of `batch`, with defaults ("rows=8")."""
    autocast: str = ""
    """ "bfloat16": forward and loss under autocast."""
    events: tuple[str, ...] = ()
    """The loop: calls of `step(seed, ...)` and what happens between them."""
    limit: tuple[tuple[str, float], ...] = (("memory_ratio", 1.0),)
    """The limit asked of `magis.optimize` and of cases."""


LISTS = tuple(field.name for field in fields(Script) if field.name in
              ("events", "forward", "setup", "init", "batch", "prelude", "optimizer"))  # fmt: skip
"""The sections that shrinking drops statements from, those that say most first."""


def source(script: Script, footer: str = "") -> str:
    """The script as a program."""
    return "\n".join([IMPORTS, *_parts(script), footer]).rstrip() + "\n"


def _parts(script: Script) -> Iterator[str]:
    if script.prelude:
        yield "\n\n".join(script.prelude) + "\n"
    if script.forward or script.init or script.result:
        yield "class Net(nn.Module):"
        yield _indented("def __init__(self):", ("super().__init__()", *script.init), 1)
        arguments = ", ".join(("self", *script.takes))
        yield _indented(f"def forward({arguments}):", (*script.forward, f"return {script.result}"), 1)
    tensors = f"({_tuple(script.inputs)}, {_tuple(script.targets)})"
    how = f", {script.how}" if script.how else ""
    yield _indented(f"def batch(seed{how}):", ("torch.manual_seed(seed)", *script.batch, f"return {tensors}"), 0)
    yield _indented(f"def loss_fn({', '.join(('out', *script.targets))}):", (f"return {script.loss}",), 0)
    yield "torch.manual_seed(0)"
    yield "\n".join((*script.setup, *script.optimizer)) + "\n"


def _tuple(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _indented(head: str, body: tuple[str, ...], depth: int) -> str:
    text = "\n".join((head, *(textwrap.indent(line, "    ") for line in body)))
    return textwrap.indent(text, "    " * depth) + "\n"


def namespace(script: Script) -> dict[str, Any]:
    """What the script defines before its first event: `model`, `optimizer`, `batch`, `loss_fn`."""
    text = source(script)
    name = "script.py"  # as errors show it
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    found: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, name, "exec"), found)
    return found


def printed(script: Script) -> str:
    """The program that shows the loop with `magis.optimize`; `judge` says what is wrong with it."""
    limit = ", ".join(f"{name}={value}" for name, value in script.limit)
    cast = f", autocast=torch.{script.autocast}" if script.autocast else ""
    footer = "\n".join(
        (
            "# step(n) is planned(*batch(n)):",
            f"planned = magis.optimize(model, batch(0), loss_fn, optimizer, {limit}, budget=20{cast})",
            *script.events,
        )
    )
    return source(script, footer)


def shortened(script: Script, section: str, keep: Callable[[int], bool]) -> Script:
    """Without the statements of a section that `keep` does not."""
    lines = tuple(line for number, line in enumerate(getattr(script, section)) if keep(number))
    return replace(script, **{section: lines})  # type: ignore[arg-type]
