"""Prints the lines of tracked Python by room: the core's packages, its neighbours, tests, benchmarks, tools.

.venv/bin/python tools/size.py
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for tests.layering, which says what the neighbours are

from tests.layering import NEIGHBOURS, PACKAGES, neighbour  # noqa: E402

OTHERS = ("tests", "benchmarks", "tools")


def room(path: str) -> str | None:
    """Name the room of a file: "magis.graph" of the core, "neighbour ranks", "tests"; None outside of rooms."""
    folders = Path(path).parts[:-1]
    top = folders[0] if folders else ""
    if top in OTHERS:
        return top
    if top not in PACKAGES:
        return None
    owner = neighbour(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    if owner is not None:
        return f"neighbour {owner}"
    return ".".join(folders[:2]) if top == "magis" else top


def lines_by_room(root: Path, paths: Iterable[str]) -> dict[str, int]:
    """Count the lines of each room's files."""
    counted: Counter[str] = Counter()
    for path in paths:
        if (name := room(path)) is not None:
            counted[name] += len((root / path).read_text(encoding="utf-8").splitlines())
    return dict(counted)


def table(rooms: Mapping[str, int]) -> dict[str, int]:
    """Order rooms for reading, with their sums: "core", "neighbours" and "everything" (both packages)."""
    neighbours = {f"neighbour {name}": rooms.get(f"neighbour {name}", 0) for name in NEIGHBOURS}
    core = {name: lines for name, lines in sorted(rooms.items()) if name not in neighbours and name not in OTHERS}
    of_core, of_neighbours = sum(core.values()), sum(neighbours.values())
    return {
        **core,
        "core": of_core,
        **neighbours,
        "neighbours": of_neighbours,
        "everything": of_core + of_neighbours,
        **{name: rooms.get(name, 0) for name in OTHERS},
    }


def main() -> int:
    """Print the table of the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]
    for name, lines in table(lines_by_room(ROOT, paths)).items():
        print(f"{name:24} {lines:8,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
