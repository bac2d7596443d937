"""The catalogue: what splits every kind of call has, and that cutting real tensors agrees."""

from __future__ import annotations

import difflib
import os
import warnings
from math import gcd

import pytest

from magis.ops.operators import OPERATORS
from magis.ops.splits import COMBINATIONS, Halo, Overlap, Split, dimension, splits, why_opaque
from tests.golden.golden import SWITCH
from tests.ops.catalogue import FILE, case_of, entries, rewritten, split_text
from tests.ops.cutting import Case, problems

ENTRIES = entries()
NEVER_RUN = {"_masked_scale", "set"}
"""Names of rules that no line calls: they need a GPU, or give no tensor."""


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The use of `x.T`")
        return {entry.call: case_of(entry.call) for entry in ENTRIES}


def texts(case: Case) -> list[str]:
    found = splits(case.op, case.values)
    return [split_text(split) for split in found] or [why_opaque(case.op, case.values)]


def test_splits_are_as_written(cases: dict[str, Case]) -> None:
    now = rewritten({call: texts(case) for call, case in cases.items()})
    if os.environ.get(SWITCH):
        FILE.write_text(now, encoding="utf-8")
        return
    known = FILE.read_text(encoding="utf-8")
    if now != known:
        lines = difflib.unified_diff(known.splitlines(), now.splitlines(), FILE.name, "now", lineterm="", n=1)
        pytest.fail("\n".join([*lines, f"if the new splits are right: {SWITCH}=1 pytest tests/ops"]), pytrace=False)


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_parts_give_the_whole(cases: dict[str, Case]) -> None:
    found = {call: lines for call, case in cases.items() if (lines := problems(case, largest=1000))}
    assert found == {}


def test_splits_are_well_formed(cases: dict[str, Case]) -> None:
    for call, case in cases.items():
        found = splits(case.op, case.values)
        assert len({(split.inputs, split.outputs) for split in found}) == len(found), call
        for split in found:
            assert malformed(case, split) == "", f"{call}: {split}"
        assert bool(why_opaque(case.op, case.values)) == (not found), call


def malformed(case: Case, split: Split) -> str:
    """What breaks the contract of Split, whatever the call computes."""
    taken = [case.values[number] for number in case.op.inputs()]
    made = [None if number is None else case.values[number] for number in case.op.outputs]
    if len(split.inputs) != len(taken) or len(split.outputs) != len(made):
        return "not one entry per tensor"
    sizes = []
    if any(isinstance(how, Overlap) for how in split.inputs) or any(isinstance(how, Halo) for how in split.outputs):
        return "a halo is taken, rows that overlap are made"
    for value, how in zip((*taken, *made), (*split.inputs, *split.outputs), strict=True):
        dim = dimension(how)
        if dim is not None:
            if value is None or not 0 <= dim < len(value.shape):
                return "no such dimension"
            sizes.append(value.shape[dim])
    owners = {value.storage for value in taken}
    for value, how in zip(made, split.outputs, strict=True):
        if (value is None) != (how is None):
            return "an output without a way to combine it, or the other way round"
        if isinstance(how, str) and (how not in COMBINATIONS or (value and value.numel and value.storage in owners)):
            return "an unknown combination, or one on memory that the parts share"
    if all(how in (None, "same") for how in split.outputs):
        return "every part does everything"
    return "" if split.extent > 1 and gcd(*sizes) % split.extent == 0 else "the extent divides not every size"


def test_every_rule_is_tried() -> None:
    """By a line of the catalogue; operators of which no calls can be cut are known by their reason."""
    tried = {entry.name for entry in ENTRIES}
    assert {name for name, row in OPERATORS.items() if row.split} - tried - NEVER_RUN == set()
