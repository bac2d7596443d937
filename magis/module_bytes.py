"""Bytes by module and kind: what makes a peak, and what grows from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from magis.printable import printable
from magis.units import format_bytes

__all__ = ["ModuleBytes", "Peak", "StepGrowth", "collapsed", "is_below"]

NAMED = 3


@dataclass(frozen=True)
class ModuleBytes:
    """Bytes of one kind that belong to one module."""

    kind: str
    """Of what is held: "parameter", "buffer", "state" (the optimizer's), "batch", "constant", "activation" (made by the
    forward pass), "gradient" (by the backward pass) or "update". Of what a plan does: "recomputed", "swapped", "in 8
    parts"."""
    module: str
    """Path of the module; empty: outside of all sub-modules, as the loss is. "layers.3.*": all modules below "layers.3"
    together; "*": all sub-modules."""
    nbytes: int
    count: int
    """Tensors, or calls of what a plan does."""
    line: str = ""
    """Where in the user's code the largest of them is made ("net.py:31"); empty where that is not known."""


def collapsed(rows: Iterable[ModuleBytes], most: int) -> tuple[ModuleBytes, ...]:
    """The rows, most bytes first; at most ``most`` of them where that is possible (a kind may need two).

    Where there are more, all modules below one become one row ("layers.3.*"), those with the fewest bytes first. So a
    row tells all that it stands for: what is below "layers.3" is in no other row of that kind.
    """
    found = {(row.kind, row.module): row for row in rows}
    below: dict[tuple[str, str], int] = {}
    for (kind, module), row in found.items():
        path = module
        while path:
            path = path.rpartition(".")[0]
            below[kind, path] = below.get((kind, path), 0) + row.nbytes
    for kind, path in sorted(below, key=lambda key: (below[key], -len(key[1]), key)):
        if len(found) <= most:
            break
        members = [key for key in found if key[0] == kind and is_below(key[1], path)]
        if len(members) > 1:
            taken = [found.pop(key) for key in members]
            name = f"{path}.*" if path else "*"
            nbytes, count = sum(row.nbytes for row in taken), sum(row.count for row in taken)
            found[kind, name] = ModuleBytes(kind, name, nbytes, count)
    return tuple(sorted(found.values(), key=lambda row: (-row.nbytes, row.kind, row.module)))


def is_below(module: str, path: str) -> bool:
    """Whether a module's path is strictly below another one; every path but the empty one is below that."""
    return module.startswith(f"{path}.") if path else bool(module)


@dataclass(frozen=True)
class Peak:
    """What makes the peak of a step's tensors, and the scratch at the peak of all bytes."""

    op: str
    """The operator during which the tensors peak; empty where no operator runs."""
    module: str
    phase: str
    """ "forward", "backward" or "update"."""
    line: str
    held: tuple[ModuleBytes, ...]
    """By module and kind, most bytes first; they sum to the peak of tensor bytes."""
    scratch_bytes: int = 0
    """Of the operator during which tensors + scratch peak."""
    scratch_op: str = ""
    scratch_module: str = ""

    @property
    def tensor_bytes(self) -> int:
        return sum(row.nbytes for row in self.held)


@dataclass(frozen=True)
class StepGrowth:
    """What a step leaves alive that the step before it did not: memory that grows as training goes on."""

    nbytes: int
    """More bytes alive after the last step that was looked at than after the second one."""
    steps: int
    """That were looked at."""
    made: tuple[ModuleBytes, ...]
    """Where the tensors are made that were not there after the second step, most bytes first."""

    def __str__(self) -> str:
        """In one line, with the places that most bytes are from."""
        places = [
            f"{row.module or 'no sub-module'} ({row.count} {row.kind}{'s' if row.count > 1 else ''}"
            f"{f' at {row.line}' if row.line else ''})"
            for row in self.made[:NAMED]
        ]
        more = f"{format_bytes(self.nbytes)} more are alive after step {self.steps} than after step 2"
        made = f", made in {', '.join(places)}" if places else ""
        return printable(f"memory grows from step to step: {more}{made}")
