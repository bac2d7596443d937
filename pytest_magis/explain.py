"""Explanations of memory growth: tensors alive at the peak by module, now and in the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from magis.results import ModuleBytes, Peak, collapsed, is_below
from magis.units import format_bytes

Table: TypeAlias = Mapping[str, Mapping[str, int]]
"""Bytes alive at a peak: kind -> module -> bytes, grouped as in `Peak.held`."""

STORED = 96
"""Maximum number of rows that a baseline stores."""
NAMED = 4
"""Maximum number of modules named in a line; the others are summed up."""
REST = "*"
WORDS = {
    "state": ("optimizer state", "optimizer states"),
    "batch": ("tensor of the batch", "tensors of the batch"),
    "update": ("tensor of the update", "tensors of the update"),
}
"""Singular and plural of kinds that are not English words."""


@dataclass(frozen=True)
class Growth:
    """Change in the bytes of one kind (parameters, activations, ...) of one module."""

    row: ModuleBytes
    """Bytes and number of tensors now; both 0 if none is left."""
    before: int
    largest: ModuleBytes | None = None
    """Module with the most bytes now, if the row covers several modules."""

    @property
    def nbytes(self) -> int:
        return self.row.nbytes - self.before


def as_table(peak: Peak) -> dict[str, dict[str, int]]:
    """Return the table of tensors alive at a peak, as a baseline stores it."""
    found: dict[str, dict[str, int]] = {}
    for row in collapsed(peak.held, STORED):
        found.setdefault(row.kind, {})[row.module] = row.nbytes
    return found


def growths(now: Peak, before: Table) -> list[Growth]:
    """Return the rows that changed, most growth first; every byte of both sides is counted once.

    If one side has a summed row ("layers.3.*"), it is compared with the sum of the other side's rows below that module.
    """
    theirs = [ModuleBytes(kind, module, n, 0) for kind, modules in before.items() for module, n in modules.items()]
    ours = _group_rows(now.held, theirs)
    known = {key: sum(row.nbytes for row in rows) for key, rows in _group_rows(theirs, now.held).items()}
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


def _group_rows(rows: Iterable[ModuleBytes], others: Iterable[ModuleBytes]) -> dict[tuple[str, str], list[ModuleBytes]]:
    """Group rows by kind and module, or by the other side's summed row ("layers.3.*") that contains the module."""
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
    """Return one line that names the modules whose tensors grew, or the largest ones if the baseline has no table."""
    if now is None:
        return ""
    if before is None:
        most = _by_module([Growth(row, 0) for row in now.held])
        return f"at the peak most is held by {_listed(most, sign=False)} (its baseline has no table to compare with)"
    changed = growths(now, before)
    if sum(each.nbytes for each in changed) > 0:
        at = f"; the peak is at {operator_at(now)}" if now.op else ""
        return f"grew at the peak: {_listed(_by_module(changed), sign=True)}{at}"
    if now.scratch_bytes:
        of = f" of {now.scratch_module}" if now.scratch_module else ""
        scratch = f"{format_bytes(now.scratch_bytes)} of scratch of {now.scratch_op}{of}"
        return f"the tensors of the {step} step did not grow; its peak has {scratch}"
    return ""


def grown_line(now: Peak | None, before: Table | None) -> str:
    """Return the line of the user's code ("net.py:31") of the module that grew most; without a table, that holds most.

    Empty if nothing grew, or no line is known.
    """
    held = now.held if now is not None else ()
    changed = growths(now, before) if now is not None and before is not None else [Growth(row, 0) for row in held]
    if sum(each.nbytes for each in changed) <= 0:
        return ""
    rows = (each for _, members in _by_module(changed) for each in members)
    return next((each.row.line for each in rows if each.nbytes > 0 and each.row.line), "")


def _by_module(changed: list[Growth]) -> list[tuple[str, list[Growth]]]:
    """Group changes by module, most growth first."""
    found: dict[str, list[Growth]] = {}
    for each in changed:
        found.setdefault(each.row.module, []).append(each)
    return sorted(found.items(), key=lambda item: (-sum(each.nbytes for each in item[1]), item[0]))


def _listed(modules: list[tuple[str, list[Growth]]], *, sign: bool) -> str:
    """Return a text that lists the first modules with their bytes and tensors, and the sum of the others."""
    named = [item for item in modules[:NAMED] if sum(each.nbytes for each in item[1]) > 0]
    rest = sum(each.nbytes for _, members in modules[len(named) :] for each in members)
    texts = [
        f"{module_name(module)} {_amount(sum(each.nbytes for each in members), sign=sign)} "
        f"({', '.join(_kinds_in_words(members))})"
        for module, members in named
    ]
    if rest:
        texts.append(f"others {_amount(rest, sign=sign)}")
    return ", ".join(texts)


def _kinds_in_words(members: list[Growth]) -> Iterator[str]:
    for each in members:
        if each.nbytes > 0:
            most = f", most of {module_name(each.largest.module)}" if each.largest is not None else ""
            yield f"{tensors_in_words(each.row)}{most}"


def _amount(nbytes: int, *, sign: bool) -> str:
    return f"{'+' if sign and nbytes > 0 else ''}{format_bytes(nbytes)}"


def tensors_in_words(row: ModuleBytes) -> str:
    """Return the tensors of a row in words, such as "3 activations at net.py:31"."""
    one, several = WORDS.get(row.kind, (row.kind, f"{row.kind}s"))
    return f"{row.count} {one if row.count == 1 else several}{f' at {row.line}' if row.line else ''}"


def operator_at(peak: Peak) -> str:
    """Return the operator at a peak in words, such as "aten.mm of layers.3 (backward, net.py:31)"."""
    of = f" of {peak.module}" if peak.module else ""
    line = f", {peak.line}" if peak.line else ""
    return f"{peak.op}{of} ({peak.phase}{line})"


def module_name(module: str) -> str:
    """Return the path of a module, or "(no sub-module)" for the root."""
    return module or "(no sub-module)"
