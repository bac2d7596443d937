"""What benchmarks have in common as programs: arguments, a head that says what made a table, its lines as they come."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from magis import __version__

__all__ = ["arguments", "head", "printed"]


def arguments(about: str | None, **defaults: object) -> argparse.ArgumentParser:
    """The parser of a benchmark's command line, whose help begins with its description.

    ``defaults`` become options, ``names`` what stands for itself: with values of the default's type, any number where
    that is a list, none where it is False. A type stands for an option that need not be given.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = name if name == "names" else f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="*", type=type(default[0]), default=default)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser


def head(*facts: str) -> tuple[str, str]:
    """When, with what, and by which command."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "numpy", "numba"))
    here = f"magis {__version__}, {versions}, Python {platform.python_version()}, {os.cpu_count()} cores"
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return ", ".join((f"# {dt.datetime.now(tz=dt.UTC).date()}, {here}", *facts)), f"# {command}"


def printed(lines: Iterable[str], output: Path | None = None) -> list[str]:
    """Print lines as they come, and return them; the file holds all so far at any time, should the run be cut off."""
    found = []
    for line in lines:
        found.append(line)
        print(line, flush=True)
        if output is not None:
            output.write_text("\n".join(found) + "\n", encoding="utf-8")
    return found
