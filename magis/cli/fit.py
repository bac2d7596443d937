"""`magis fit`: the largest batch, or sequence, that fits a memory limit: in eager mode, and optimized."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magis.errors import UsageError
from magis.models.names import resolve
from magis.units import format_bytes, format_milliseconds, parse_bytes

if TYPE_CHECKING:
    from magis.api import Fit

__all__ = ["add"]

DESCRIPTION = """
Find the largest size of a model whose training step fits a memory limit. The size is that of a dimension of the batch,
or a keyword that the factory takes. Nothing of that size is allocated, unless --run asks for a measurement.
"""
NOTHING_FITS = 1
HEADER = ("strategy", "size", "peak", "measured", "step", "latency ratio")


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = commands.add_parser("fit", help="the largest batch that fits a memory limit", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="package.module:factory, or a registered name")
    parser.add_argument("--memory-limit", metavar="BYTES", required=True, help='such as "8 GiB"')
    parser.add_argument("--device", metavar="NAME", help="as --magis-device")
    parser.add_argument("--preset", metavar="NAME", help="as --magis-preset, of registered names")
    parser.add_argument("--dtype", metavar="NAME", help="as --magis-dtype")
    parser.add_argument("--dim", metavar="N", help="the dimension of the batch to vary (default: 0)")
    parser.add_argument("--keyword", metavar="NAME", help="vary this keyword of the factory instead")
    parser.add_argument("--latency-ratio", metavar="R", help="the most that the optimized step may take, times eager's")
    parser.add_argument("--budget", metavar="STATES", help="work of each search, in plans evaluated")
    parser.add_argument("--most", metavar="N", help="the largest size to try (default: 1048576)")
    parser.add_argument("--precision", metavar="SHARE", help="how close the optimized size must be (default: 0.02)")
    parser.add_argument("--run", action="store_true", dest="measured", help="measure the answers, where they fit")
    parser.set_defaults(run=_run)


def _run(asked: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path.cwd()))  # a factory may lie where the command is given, as with `python -m`
    limit = parse_bytes(asked.memory_limit)
    models = resolve([asked.model])
    if len(models) != 1:
        raise UsageError(f"{asked.model!r} are {len(models)} models", hint="name one")
    from magis import api

    found = api.fit(
        models[0],
        memory_limit=limit,
        device=asked.device,
        preset=asked.preset,
        dtype=asked.dtype,
        dim=_whole("--dim", asked.dim) or 0,
        keyword=asked.keyword,
        latency_ratio=_number("--latency-ratio", asked.latency_ratio),
        budget=_whole("--budget", asked.budget),
        **_given(most=_whole("--most", asked.most), precision=_number("--precision", asked.precision)),
        run=asked.measured,
        progress=_say,
    )
    for line in _table(found):
        print(line)  # noqa: T201
    return NOTHING_FITS if found.eager is None and found.magis is None else 0


def _given(**amounts: Any) -> dict[str, Any]:
    """Those that were given: the others have defaults."""
    return {name: amount for name, amount in amounts.items() if amount is not None}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _whole(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"{flag}: {text!r} is not a whole number")
    return int(text)


def _number(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not a number") from None


def _table(found: Fit) -> Iterator[str]:
    """The answers, one line each, and what is to be known about them."""
    yield f"{found.model} on {found.device}, {found.dtype}, {found.what}, at most {format_bytes(found.limit_bytes)}"
    rows = [HEADER]
    for name, point in (("eager", found.eager), ("magis", found.magis)):
        if point is None:
            rows.append((name, "none", "-", "-", "-", "-"))
            continue
        measured = "-" if point.measured_bytes is None else format_bytes(point.measured_bytes)
        step = format_milliseconds(point.latency_ms)
        peak = format_bytes(point.peak_bytes)
        rows.append((name, str(point.size), peak, measured, step, f"{point.latency_ratio:.3f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join((first.ljust(widths[0]), *cells))
    if found.refused:
        yield f"the model takes no larger size: {found.refused}"
    elif found.bound is not None:
        larger = found.bound < found.most
        yield (
            f"no plan can fit beyond {found.bound}" if larger else f"not looked at: sizes beyond {found.most} (--most)"
        )
    if not found.is_monotone:
        yield "note: memory does not grow with every size here: a size between those that were tried may fit as well"
