"""Why a step needs more memory: what it holds at its peak, by module, against what it held when that was stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from magis.results import ModuleBytes, Peak, collapsed, is_below
from magis.units import format_bytes

Table: TypeAlias = Mapping[str, Mapping[str, int]]
"""Kind -> module -> bytes, the same partition as in `Peak.held`."""

STORED = 96
"""Rows that a baseline keeps."""
NAMED = 4
"""Modules that a line names; it sums up the others."""
REST = "*"
WORDS = {
    "state": ("optimizer state", "optimizer states"),
    "batch": ("tensor of the batch", "tensors of the batch"),
    "update": ("tensor of the update", "tensors of the update"),
}
"""Of kinds that are no words of their own: one, and several."""


@dataclass(frozen=True)
class Growth:
    """One kind of bytes of a module, now and before."""

    row: ModuleBytes
    """As it is now; no bytes and no tensors where nothing is left."""
    before: int
    largest: ModuleBytes | None = None
    """Of several modules together, the one that holds most now."""

    @property
    def nbytes(self) -> int:
        return self.row.nbytes - self.before


def as_table(peak: Peak) -> dict[str, dict[str, int]]:
    """What a baseline keeps of a peak."""
    found: dict[str, dict[str, int]] = {}
    for row in collapsed(peak.held, STORED):
        found.setdefault(row.kind, {})[row.module] = row.nbytes
    return found


def growths(now: Peak, before: Table) -> list[Growth]:
    """What changed, most growth first; every byte of both sides is counted once.

    A row of one side that the other has in several ("layers.3.*") is compared with their sum.
    """
    theirs = [ModuleBytes(kind, module, n, 0) for kind, modules in before.items() for module, n in modules.items()]
    ours = _together(now.held, theirs)
    known = {key: sum(row.nbytes for row in rows) for key, rows in _together(theirs, now.held).items()}
    found = []
    for kind, module in sorted({*ours, *known}):
        rows = ours.get((kind, module), [])
        row = ModuleBytes(kind, module, sum(each.nbytes for each in rows), sum(each.count for each in rows))
        largest = max(rows, key=lambda each: each.nbytes, default=None)
        if largest is not None and largest.module == module:
            row, largest = replace(row, line=largest.line), None
        if row.nbytes != known.get((kind, module), 0):
            found.append(Growth(row, known.get((kind, module), 0), largest))
    return sorted(found, key=lambda each: (-each.nbytes, each.row.kind, each.row.module))


def _together(rows: Iterable[ModuleBytes], others: Iterable[ModuleBytes]) -> dict[tuple[str, str], list[ModuleBytes]]:
    """The rows under the names under which both sides can tell them apart."""
    rests: dict[str, list[str]] = {}
    for other in others:
        if other.module == REST or other.module.endswith(f".{REST}"):
            rests.setdefault(other.kind, []).append(other.module)
    found: dict[tuple[str, str], list[ModuleBytes]] = {}
    for row in rows:
        around = (rest for rest in rests.get(row.kind, ()) if is_below(row.module, rest.removesuffix(REST).rstrip(".")))
        found.setdefault((row.kind, next(around, row.module)), []).append(row)
    return found


def why_more(step: str, now: Peak | None, before: Table | None) -> str:
    """One line that says which modules' tensors grew, or hold most where it is not known what they held before."""
    if now is None:
        return ""
    if before is None:
        most = _by_module([Growth(row, 0) for row in now.held])
        return f"at the peak most is held by {_listed(most, sign=False)} (its baseline has no table to compare with)"
    changed = growths(now, before)
    if sum(each.nbytes for each in changed) > 0:
        return f"grew at the peak: {_listed(_by_module(changed), sign=True)}{_place(now)}"
    if now.scratch_bytes:
        of = f" of {now.scratch_module}" if now.scratch_module else ""
        scratch = f"{format_bytes(now.scratch_bytes)} of scratch of {now.scratch_op}{of}"
        return f"the tensors of the {step} step did not grow; its peak has {scratch}"
    return ""


def _by_module(changed: list[Growth]) -> list[tuple[str, list[Growth]]]:
    """Modules, most growth first."""
    found: dict[str, list[Growth]] = {}
    for each in changed:
        found.setdefault(each.row.module, []).append(each)
    return sorted(found.items(), key=lambda item: (-sum(each.nbytes for each in item[1]), item[0]))


def _listed(modules: list[tuple[str, list[Growth]]], *, sign: bool) -> str:
    named = [item for item in modules[:NAMED] if sum(each.nbytes for each in item[1]) > 0]
    rest = sum(each.nbytes for _, members in modules[len(named) :] for each in members)
    texts = [
        f"{module_name(module)} {_amount(sum(each.nbytes for each in members), sign=sign)} "
        f"({', '.join(_kinds(members))})"
        for module, members in named
    ]
    if rest:
        texts.append(f"others {_amount(rest, sign=sign)}")
    return ", ".join(texts)


def _kinds(members: list[Growth]) -> Iterator[str]:
    for each in members:
        if each.nbytes > 0:
            most = each.largest
            yield f"{what(each.row)}{f', most of {module_name(most.module)}' if most is not None else ''}"


def _amount(nbytes: int, *, sign: bool) -> str:
    return f"{'+' if sign and nbytes > 0 else ''}{format_bytes(nbytes)}"


def what(row: ModuleBytes) -> str:
    """Tensors in words: "3 activations at net.py:31"."""
    one, several = WORDS.get(row.kind, (row.kind, f"{row.kind}s"))
    return f"{row.count} {one if row.count == 1 else several}{f' at {row.line}' if row.line else ''}"


def module_name(module: str) -> str:
    """A module's path for a reader."""
    return module or "(no sub-module)"


def _place(peak: Peak) -> str:
    of = f" of {peak.module}" if peak.module else ""
    line = f", {peak.line}" if peak.line else ""
    return f"; the peak is at {peak.op}{of} ({peak.phase}{line})" if peak.op else ""
