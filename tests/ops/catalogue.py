"""Calls as people write them and the splits that they have: `catalogue.txt`, one call per line.

    mm.default(f[4,6], f[6,8])
        0 . -> 0 (4)

says that `mm` has a split that cuts dimension 0 of the first argument, takes all of the second, and joins the results
along dimension 0, into at most 4 parts. `f[4,6]` is a float64 tensor, `i[...]` int64, `b[...]` bool, `c[...]`
complex128, `u[...]` uint8, row by row unless strides follow in braces; `~conj` or `~neg` behind it are bits that are
set. Literals that are divided follow as `@path`; a call without splits has its reason instead.
Where new splits are right, write them down and look at what git says: `MAGIS_UPDATE_GOLDEN=1 pytest tests/aten`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from magis.cost.signature import parse
from magis.graph import Op, Value
from magis.ops.fake_results import bits_of
from magis.ops.splits import Cut, Halo, How, Overlap, Split
from tests.ops.cutting import Case, draw, run

FILE = Path(__file__).with_name("catalogue.txt")
_TENSOR = re.compile(r"\b([fibcu])\[([\d,]*)\](\{[\d,]*\})?")
_TYPES = {"f": "float64", "i": "int64", "b": "bool", "u": "uint8", "c": "complex128"}


@dataclass(frozen=True)
class Entry:
    """A call of the catalogue, and the lines that follow it."""

    call: str
    splits: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.call.split(".")[0].removesuffix("_")


def entries() -> list[Entry]:
    found: list[Entry] = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            found[-1] = replace(found[-1], splits=(*found[-1].splits, line.strip()))
        elif line and not line.startswith("#"):
            found.append(Entry(line, ()))
    return found


def rewritten(splits: dict[str, list[str]]) -> str:
    """The file with these lines below the calls; headings stay."""
    kept = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("    "):
            kept.append(line)
            kept += [f"    {split}" for split in splits.get(line, ())]
    return "\n".join(kept) + "\n"


def split_text(split: Split) -> str:
    """A split as the catalogue writes it."""
    taken = " ".join(_how_text(dim, ".") for dim in split.inputs)
    made = " ".join(_how_text(dim, "none") for dim in split.outputs)
    paths = "".join(" @" + _path_text(path) for path in split.sizes)
    paths += "".join(f" @{_path_text(path)}={literal}" for path, literal in split.replaced)
    return f"{taken} -> {made} ({split.extent}){paths}".strip()


def _how_text(how: Cut | How, nothing: str) -> str:
    """`2-1+3`: a stretch of dimension 2 with the row before and 3 behind it."""
    if isinstance(how, Halo | Overlap):
        return f"{how.dim}-{how.before}+{how.after}"
    return nothing if how is None else str(how)


def _path_text(path: tuple[int, ...]) -> str:
    return ".".join(map(str, path))


def call_of(line: str) -> tuple[Op, dict[int, Value]]:
    """The call that a line describes, without outputs."""
    return parse("aten." + _TENSOR.sub(_written_out, line))


def _written_out(found: re.Match[str]) -> str:
    kind, shape, strides = found.groups()
    sizes = [int(size) for size in shape.split(",") if size]
    steps = [1] * len(sizes)
    for place in range(len(sizes) - 2, -1, -1):
        steps[place] = steps[place + 1] * sizes[place + 1]
    return f"{_TYPES[kind]}[{shape}]" + (strides or "{" + ",".join(map(str, steps)) + "}")


def case_of(line: str) -> Case:
    """The call of a line with its outputs, as a run of it shows them."""
    op, values = call_of(line)
    tensors = draw(Case(op, values))
    owners = {tensor.untyped_storage().data_ptr(): number for tensor, number in zip(tensors, op.inputs(), strict=True)}
    numbers: list[int | None] = []
    for result in run(op, tensors):
        if result is None:
            numbers.append(None)
            continue
        number = len(values)
        owner = owners.get(result.untyped_storage().data_ptr()) if result.numel() else None
        values[number] = Value(
            number,
            tuple(result.shape),
            tuple(result.stride()),
            str(result.dtype).removeprefix("torch."),
            number if owner is None else values[owner].storage,
            int(result.storage_offset()),
            bits=bits_of(result),
        )
        numbers.append(number)
    return Case(replace(op, outputs=tuple(numbers)), values)
