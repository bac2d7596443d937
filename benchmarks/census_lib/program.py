"""The census as a program: what its command line asks for, the networks in their order, and where results go."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmarks.census_lib import shim
from benchmarks.census_lib.apart import Limits, Work, rows
from benchmarks.census_lib.table import causes, page, summary, table

LIBRARIES = ("plain", "transformers", "timm", "torchvision", "diffusers")


def library(name: str) -> Any:
    return import_module(f"benchmarks.census_lib.{name}_nets")


def census(name: str, family: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Everything about one network; in a process of its own."""
    from benchmarks.census_lib.judge import whole
    from benchmarks.census_lib.network import NotBuilt, NotRun

    row: dict[str, Any] = {"stage": "build"}
    tell(row)
    started = time.process_time()
    try:
        network = library(name).network(family)
    except NotBuilt as error:
        tell({"stage": "not run" if isinstance(error, NotRun) else "not built", "why": str(error)})
        return
    row = {"network": network.name, "build_s": time.process_time() - started, "stage": "gate"}
    tell(row)
    whole(network, lambda known: tell({**row, **known}))


def works(libraries: list[str], families: list[str], done: set[str], seed: int) -> Iterator[tuple[str, Work]]:
    """In an order drawn from the seed, so that a run that was cut off is a sample of the whole."""
    keys = [(each, family) for each in libraries for family in library(each).families()]
    random.Random(seed).shuffle(keys)
    for each, family in keys:
        key = f"{each}/{family}"
        if key not in done and (not families or family in families):
            yield key, partial(census, each, family)


def preload(libraries: list[str]) -> None:
    """What every process needs, loaded once; no operator runs here, since threads do not survive a fork."""
    from benchmarks.census_lib import judge  # noqa: F401

    for each in libraries:
        for module in library(each).SHARED:
            with suppress(ImportError):
                import_module(module)


def run(description: str) -> None:
    """Run the census, as told on the command line, and print its table."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--library", default=",".join(LIBRARIES), help="default: %(default)s")
    parser.add_argument("--family", default="", help="only these")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="processor seconds of each of a network's stages")
    parser.add_argument("--first", type=int, help="only so many, drawn from the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="one line for each network")
    parser.add_argument("--resume", action="store_true", help="leave out what the file of --json has")
    parser.add_argument("--output", type=Path, help="the table")
    parser.add_argument("--causes", type=Path, help="failures by cause")
    parser.add_argument("--docs", type=Path, help="a document that shows the census between its marks")
    asked = parser.parse_args()
    if asked.resume and asked.json is None:
        parser.error("--resume needs --json")
    libraries = asked.library.split(",")
    alive = shim.torchvision_operators()
    preload(libraries)
    known: dict[str, dict[str, Any]] = {}
    if asked.resume and asked.json is not None and asked.json.exists():
        known = {row["key"]: row for row in map(json.loads, asked.json.read_text(encoding="utf-8").splitlines())}
    elif asked.json is not None:
        asked.json.write_text("", encoding="utf-8")
    todo = list(works(libraries, [each for each in asked.family.split(",") if each], set(known), asked.seed))
    for key, row in rows(todo[: asked.first], Limits(asked.limit), asked.jobs):
        known[key] = {"key": key, **row}
        if asked.json is not None:
            with asked.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[key]) + "\n")
        print(summary(known[key]), flush=True)
    del alive
    found = list(known.values())
    head = (
        f"# {dt.datetime.now(tz=dt.UTC).date()}, {', '.join(versions())}\n"
        f"# python benchmarks/census.py {shlex.join(sys.argv[1:])}".rstrip()
    )
    text = f"{head}\n{table(found)}\n"
    print(text)
    if asked.output is not None:
        asked.output.write_text(text, encoding="utf-8")
    if asked.causes is not None:
        asked.causes.write_text(f"{head}\n{causes(found)}\n", encoding="utf-8")
    if asked.docs is not None:
        asked.docs.write_text(page(asked.docs.read_text(encoding="utf-8"), head, found), encoding="utf-8")


def versions() -> Iterator[str]:
    """Of what is counted."""
    for name in ("torch", *LIBRARIES[1:], "peft"):
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"
