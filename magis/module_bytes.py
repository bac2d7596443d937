"""Memory by module and kind of tensor: at a peak, or of growth from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from magis.printable import printable
from magis.units import format_bytes

__all__ = ["ModuleBytes", "Peak", "StepGrowth", "collapsed", "is_below"]

NAMED = 3


@dataclass(frozen=True)
class ModuleBytes:
    """Bytes of one kind of tensor in one module."""

    kind: str
    """Kind of the tensors: "parameter", "buffer", "state" (of the optimizer), "batch", "constant", "activation" (made
    by the forward), "gradient" (by the backward), "update". In a plan's changes: "recomputed", "swapped", "in 8 parts".
    """
    module: str
    """Path of the module; empty: outside of all sub-modules, as the loss is. "layers.3.*": all modules below "layers.3"
    together; "*": all sub-modules."""
    nbytes: int
    count: int
    """Number of tensors; in a plan's changes, number of calls."""
    line: str = ""
    """Line of the user's code that makes the largest of the tensors ("net.py:31"); empty if unknown."""


def collapsed(rows: Iterable[ModuleBytes], most: int) -> tuple[ModuleBytes, ...]:
    """Sort rows by falling bytes, and merge modules until at most ``most`` rows are left (two per kind if need be).

    Modules below a common parent become one row ("layers.3.*"), parents with the fewest bytes first. No other row of
    that kind then names a module below "layers.3".
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
    """Return True if the module's path is strictly below ``path``; below the empty path is every other one."""
    return module.startswith(f"{path}.") if path else bool(module)


@dataclass(frozen=True)
class Peak:
    """Tensors alive at a step's peak of tensor bytes, and scratch at the step's peak of tensors + scratch."""

    op: str
    """Operator at which tensor bytes peak; empty if the peak is outside of all operators."""
    module: str
    phase: str
    """Phase of the operator: "forward", "backward" or "update"."""
    line: str
    held: tuple[ModuleBytes, ...]
    """Tensors alive at the peak by module and kind, most bytes first; their bytes sum to the peak of tensor bytes."""
    scratch_bytes: int = 0
    """Scratch bytes of the operator at which tensors + scratch peak."""
    scratch_op: str = ""
    scratch_module: str = ""

    @property
    def tensor_bytes(self) -> int:
        return sum(row.nbytes for row in self.held)


@dataclass(frozen=True)
class StepGrowth:
    """Growth of memory from step to step: bytes that every step leaves allocated."""

    nbytes: int
    """Bytes allocated after the last measured step minus those after the second step."""
    steps: int
    """Number of steps that were run."""
    made: tuple[ModuleBytes, ...]
    """Tensors allocated since the second step by module and line, most bytes first."""
    cyclic_bytes: int = 0
    """Bytes of those in reference cycles, which stay until Python's garbage collector runs."""

    def __str__(self) -> str:
        """Describe the growth in one line, with the modules that allocated most bytes."""
        places = [
            f"{row.module or 'no sub-module'} ({row.count} {row.kind}{'s' if row.count > 1 else ''}"
            f"{f' at {row.line}' if row.line else ''})"
            for row in self.made[:NAMED]
        ]
        more = f"{format_bytes(self.nbytes)} more are alive after step {self.steps} than after step 2"
        made = f", made in {', '.join(places)}" if places else ""
        if self.cyclic_bytes:
            made += f"; {format_bytes(self.cyclic_bytes)} are in reference cycles until Python's collector runs"
        return printable(f"memory grows from step to step: {more}{made}")
