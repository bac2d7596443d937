"""Numbers that a forward only counts on: `self.calls += 1`, `self.seen += len(x)`, and nothing else that looks at them.

Such a number decides nothing that the step computes. A planned step, in which no Python of the forward runs, counts on
as far as the forward does.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules import module as global_hooks

__all__ = ["advance", "counting_loads", "holder_of", "runs_later"]

_ADDS = ("+", "+=")
_LATER = frozenset({torch.utils.checkpoint.__file__, torch.autograd.function.__file__, torch.autograd.graph.__file__})
_TORCH = str(Path(torch.__file__).parent)
_BACKWARD_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def counting_loads(code: types.CodeType) -> frozenset[int]:
    """Offsets of the instructions that load an attribute for nothing but to store it again, with a number added."""
    steps = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    loads: dict[str, list[int]] = {}
    stores: Counter[str] = Counter()
    found: set[int] = set()
    for at, one in enumerate(steps):
        if one.opname == "LOAD_ATTR" and at and steps[at - 1].opname in ("COPY", "DUP_TOP"):
            loads.setdefault(str(one.argval), []).append(one.offset)
        elif one.opname == "STORE_ATTR" and at > 1:
            if steps[at - 1].opname == "SWAP" and steps[at - 2].argrepr == "+=":
                stores[str(one.argval)] += 1
            elif _adds(steps, at):
                found.add(steps[at - 4].offset)
    for name, offsets in loads.items():
        if stores[name] == len(offsets):  # each of these is the beginning of a `+=`
            found.update(offsets)
    return frozenset(found)


def runs_later(codes: Iterable[types.CodeType], roots: Iterable[object]) -> bool:
    """Whether code may run beside a forward's: in its backward (hooks, own gradients), or again (checkpoints)."""
    hooked = any(
        getattr(part, kind, None)
        for root in roots
        if isinstance(root, nn.Module)
        for part in (*root.modules(), global_hooks)
        for kind in _BACKWARD_HOOKS
    )
    return hooked or any(
        code.co_filename in _LATER or (code.co_filename.startswith(_TORCH) and code.co_name.startswith("register_"))
        for code in codes
    )


def _adds(steps: list[dis.Instruction], at: int) -> bool:
    """Whether what is stored at `at` is `self.n = self.n + 1`: holder, load, constant, sum, the same holder."""
    if at < 5:
        return False
    holder, load, number, total, again = steps[at - 5 : at]
    return (
        load.opname == "LOAD_ATTR"
        and load.argval == steps[at].argval
        and number.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
        and total.argrepr in _ADDS
        and again.opname.startswith("LOAD_FAST")
        and (holder.opname, holder.argval) == (again.opname, again.argval)
    )


def holder_of(roots: Mapping[str, object], path: str) -> tuple[nn.Module, str] | None:
    """The module that has the attribute of this path (`model._modules.norm.calls`), and its name; None without one."""
    *way, name = path.split(".")
    item: Any = roots
    for part in way:
        inside = item if isinstance(item, Mapping) else getattr(item, "__dict__", {})
        if part not in inside:
            return None
        item = inside[part]
    return (item, name) if isinstance(item, nn.Module) and name in vars(item) else None


def advance(roots: Mapping[str, object], counted: Iterable[tuple[str, int]]) -> None:
    """Count on: add to each number, by its path, what one call of the forward adds."""
    for path, step in counted:
        found = holder_of(roots, path)
        if found is not None:  # else somebody has taken it away, as they may: nothing looks at it
            module, name = found
            setattr(module, name, getattr(module, name) + step)
