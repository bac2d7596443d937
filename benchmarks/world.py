"""Predicted bytes of a tiny network of every family of transformers, under several releases of torch and transformers.

    python benchmarks/world.py run --torch 2.13.0 --transformers 5.23.0 [--first 330] [--family gpt2,bert] [--jobs 2]
    python benchmarks/world.py moved [--least 0.5]
    python benchmarks/world.py explain gpt2 2.13.0/4.57.6 2.13.0/5.23.0

`run` estimates a step with AdamW on a simulated H100 for each family, in an environment of its own (.compat/, .world/),
and fills its column of benchmarks/results/world.tsv: bytes at the peak, or why there are none. Cells that are there
stay. `moved` lists the families whose bytes differ between two neighbouring columns by so many percent. `explain` says
which tensors at the peak, by kind and module, and which operators, by file, make the difference.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TABLE = ROOT / "benchmarks" / "results" / "world.tsv"
LIBRARIES = ROOT / ".world"
DEVICE, SEED, SECONDS = "sim:h100", 0, 60.0
SHOWN = 12
"""Differences that `explain` lists of each sort."""
REASON = 60
"""Characters of a reason in the table."""

Table = dict[str, dict[str, str]]
"""Family -> column ("torch/transformers") -> cell."""


# --- inside of an environment ----------------------------------------------------------------------------------


def estimated(family: str, tell: Callable[[dict[str, Any]], None], *, whole: bool) -> None:
    """Tell the bytes of a family's step; with ``whole`` also what is alive at its peak, and its operators."""
    import magis
    from benchmarks.census_lib import transformers_nets
    from benchmarks.census_lib.network import NotBuilt, seeded

    try:
        network = transformers_nets.network(family)
    except NotBuilt as error:
        tell({"why": f"not built: {error}"})
        return
    tell({"why": "not estimated"})
    seeded(SEED)
    try:
        found = magis.estimate(network.make().train(), network.batch(), network.loss, "adamw", device=DEVICE)
    except magis.MagisError as error:
        tell({"why": f"refused: {error}"})
        return
    row: dict[str, Any] = {"bytes": found.peak_bytes}
    if whole:
        peak, operators = found.at_peak, found._subject.captured.original.graph.ops  # noqa: SLF001
        row["network"], row["peak"] = network.name, f"{peak.op} {peak.line} in {peak.module} ({peak.phase})"
        row["alive"] = [[f"{each.kind} {each.module}", each.nbytes] for each in peak.held]
        row["operators"] = Counter(f"{op.phase} {op.target} {Path(op.line).name.partition(':')[0]}" for op in operators)
    tell(row)


def inside(families: list[str], jobs: int, *, whole: bool) -> None:
    """Print a line of JSON for each family, each estimated in a process of its own."""
    from benchmarks.census_lib import shim
    from benchmarks.census_lib.apart import Limits, rows
    from benchmarks.census_lib.program import preload

    alive = shim.torchvision_operators()
    preload(["transformers"])
    work = ((each, partial(estimated, each, whole=whole)) for each in families)
    for family, row in rows(work, Limits(SECONDS), jobs):
        print(json.dumps({"family": family, **row}), flush=True)
    del alive


def inside_families() -> None:
    """Print the families of this environment's transformers."""
    from benchmarks.census_lib import transformers_nets

    print(json.dumps(transformers_nets.families()))


# --- environments ----------------------------------------------------------------------------------------------


def command(torch_release: str, transformers: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return a command that runs this program under two releases, and its environment variables."""
    from pytest_magis.baselines import torch_release as installed_release
    from tools.compat import environment

    same = installed_release() == torch_release
    python = sys.executable if same else environment(torch_release, sys.executable, "")
    place = LIBRARIES / f"transformers-{transformers}"
    if not place.exists():
        making = place.with_name(f"{place.name}.new")
        shutil.rmtree(making, ignore_errors=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(making)]
        subprocess.run([*pip, f"transformers=={transformers}"], check=True)
        for each in making.glob("numpy*"):  # the environment's own
            shutil.rmtree(each)
        making.rename(place)
    paths = os.pathsep.join([str(ROOT), str(place)])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return [python, __file__, *arguments], variables


def under(torch_release: str, transformers: str, *arguments: str) -> Iterator[Any]:
    """Run this program under two releases; yield the lines of JSON that it prints."""
    words, variables = command(torch_release, transformers, *arguments)
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield from map(json.loads, child.stdout)
    if child.returncode:
        sys.exit(f"torch {torch_release}, transformers {transformers}: exit code {child.returncode}")


# --- the table -------------------------------------------------------------------------------------------------


def stored() -> Table:
    if not TABLE.exists():
        return {}
    with TABLE.open(encoding="utf-8") as file:
        return {row.pop("family"): row for row in csv.DictReader(file, delimiter="\t")}


def store(table: Table) -> None:
    columns = sorted({each for row in table.values() for each in row}, key=releases)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["family", *columns], "", delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"family": family, **table[family]} for family in sorted(table))


def releases(column: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, each.split("."))) for each in column.split("/")]


def run(asked: argparse.Namespace) -> None:
    """Fill a column. Families come in the order of their names' digests, so that the first ones are a sample."""
    (names,) = under(asked.torch, asked.transformers, "inside-families")
    names.sort(key=lambda name: sha256(name.encode()).digest())
    table, column = stored(), f"{asked.torch}/{asked.transformers}"
    wanted = asked.family.split(",") if asked.family else names[: asked.first]
    missing = [each for each in wanted if each in names and not table.get(each, {}).get(column)]
    done = under(asked.torch, asked.transformers, "inside", ",".join(missing), f"--jobs={asked.jobs}")
    for row in done if missing else ():
        cell = str(row.get("bytes", f"{row.get('died', '')} {row.get('why', '')}".strip()[:REASON]))
        table.setdefault(row["family"], {})[column] = cell
        store(table)
        print(f"{row['family']:32} {cell}", flush=True)
    cells = [table.get(each, {}).get(column, "") for each in wanted]
    print(f"{column}: {sum(map(str.isdigit, cells))} of {len(wanted)} families have their bytes")


def moved(asked: argparse.Namespace) -> None:
    """Print the families whose bytes moved between columns that differ in one release, the nearest two."""
    table = stored()
    columns = sorted({each for row in table.values() for each in row}, key=releases)
    for one, other in pairs(columns):
        both = [
            (family, int(row[one]), int(row[other]))
            for family, row in table.items()
            if row.get(one, "").isdigit() and row.get(other, "").isdigit()
        ]
        found = [each for each in both if abs(each[2] - each[1]) >= asked.least / 100 * each[1]]
        print(f"{one} -> {other}: {len(found)} of {len(both)} families moved by {asked.least}% or more")
        for family, before, after in sorted(found, key=lambda each: each[2] / each[1]):
            print(f"    {family:32} {before:12,} -> {after:12,}  {after / before - 1:+.1%}")


def pairs(columns: list[str]) -> Iterator[tuple[str, str]]:
    """Yield neighbouring columns that differ in one of both releases alone."""
    for place in (0, 1):
        for value in sorted({each.split("/")[1 - place] for each in columns}):
            alike = [each for each in columns if each.split("/")[1 - place] == value]
            yield from pairwise(alike)


def explain(asked: argparse.Namespace) -> None:
    """Print what makes the difference between two columns for one family."""
    one, other = (next(iter(under(*column.split("/"), "inside", asked.name, "--whole"))) for column in asked.columns)
    for column, row in zip(asked.columns, (one, other), strict=True):
        if "bytes" not in row:
            sys.exit(f"{asked.name} has no bytes under {column}: {row.get('why', row.get('died'))}")
        print(f"{column}: {row['bytes']:,} bytes at {row['peak']}; {row['network']}")
    counts = [dict[str, int](), dict[str, int]()]
    for found, row in zip(counts, (one, other), strict=True):
        for what, nbytes in row["alive"]:
            found[what] = found.get(what, 0) + nbytes
    listed("bytes alive at the peak", *counts)
    listed("operators", one["operators"], other["operators"])


def listed(what: str, one: dict[str, int], other: dict[str, int]) -> None:
    changes = {key: other.get(key, 0) - one.get(key, 0) for key in {*one, *other}}
    largest = sorted((item for item in changes.items() if item[1]), key=lambda item: (-abs(item[1]), item[0]))
    print(f"{what}: {len(largest)} differ, {sum(changes.values()):+,} in all")
    for key, change in largest[:SHOWN]:
        print(f"    {change:+14,}  {key}")


def main() -> None:
    """Do as told on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    filling = commands.add_parser("run")
    filling.add_argument("--torch", required=True)
    filling.add_argument("--transformers", required=True)
    filling.add_argument("--first", type=int, help="only so many families")
    filling.add_argument("--family", default="", help="only these")
    filling.add_argument("--jobs", type=int, default=2)
    filling.set_defaults(call=run)
    moving = commands.add_parser("moved")
    moving.add_argument("--least", type=float, default=0.5, help="percent")
    moving.set_defaults(call=moved)
    explaining = commands.add_parser("explain")
    explaining.add_argument("name", help="a family")
    explaining.add_argument("columns", nargs=2, metavar="torch/transformers")
    explaining.set_defaults(call=explain)
    child = commands.add_parser("inside")
    child.add_argument("families", type=lambda text: text.split(","))
    child.add_argument("--jobs", type=int, default=1)
    child.add_argument("--whole", action="store_true")
    child.set_defaults(call=lambda asked: inside(asked.families, asked.jobs, whole=asked.whole))
    commands.add_parser("inside-families").set_defaults(call=lambda _: inside_families())
    asked = parser.parse_args()
    asked.call(asked)


if __name__ == "__main__":
    main()
