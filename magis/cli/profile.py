"""`magis profile`: measure the operators of models on the device at hand, into a file that prices latencies."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magis.cost.store import target_of
from magis.errors import UsageError
from magis.models.names import resolve

if TYPE_CHECKING:
    from magis.api.profiling import Recording

__all__ = ["add"]

DESCRIPTION = """
Measure every distinct operator of the models, the sizes that fission asks for included: median time of repeated calls
with cold caches, and scratch memory. What the file knows already is not measured again, and it is replaced after every
batch: a run that was cut off goes on where it was. Simulated devices (sim:<name>) use baselines/profiles/<name>.json.
"""
UNFINISHED = 3
"""Exit code of a recording that --seconds ended."""
SHOWN = 3
"""Operators that are named where some could not be measured."""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = commands.add_parser("profile", help="measure operators on this machine", description=DESCRIPTION)
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (default: cuda where there is a GPU)")
    parser.add_argument("--models", metavar="NAMES", default="all", help="as --magis-models (default: all)")
    parser.add_argument("--dtype", metavar="NAMES", help="data types, by commas (default: each model's own)")
    parser.add_argument("--preset", metavar="NAME", help="small or paper (default: small on cpu, else paper)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="default: baselines/profiles/<device>.json")
    parser.add_argument("--seconds", metavar="S", help="stop after so many; the next run goes on")
    parser.add_argument("--no-parts", action="store_true", help="leave out the sizes of fission")
    parser.add_argument("--threads", metavar="N", help="threads of the CPU's kernels (default: as torch has them)")
    parser.set_defaults(run=_run)


def _run(asked: argparse.Namespace) -> int:
    seconds, threads = _number("--seconds", asked.seconds), _number("--threads", asked.threads, whole=True)
    models = resolve(asked.models.split(","))
    from magis import api

    device = asked.device or api.default_device()
    api.check_device(device)
    if device.startswith("sim:"):
        raise UsageError(f"--device: {device} cannot be measured", hint="use cpu or cuda, on a machine that has it")
    if threads is not None:
        import torch

        torch.set_num_threads(int(threads))
    dtypes = tuple(name.strip() for name in asked.dtype.split(",")) if asked.dtype is not None else (None,)
    if "" in dtypes:
        raise UsageError(f"--dtype: empty item in {asked.dtype!r}")
    path = asked.out or api.profile_file(Path("baselines") / api.PROFILES, device, dtypes[0] or "")
    found = api.record_profile(
        path,
        models,
        device=device,
        preset=asked.preset or ("small" if device == "cpu" else "paper"),
        dtypes=dtypes,
        parts=not asked.no_parts,
        seconds=seconds,
        progress=_say,
    )
    print(_summary(path, found))  # noqa: T201
    return 0 if found.in_time else UNFINISHED


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _number(flag: str, text: str | None, *, whole: bool = False) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e6 or (whole and number != int(number)):
        raise UsageError(f"{flag}: {text!r} is not a {'whole ' if whole else ''}number above 0 and below a million")
    return number


def _summary(path: Path, found: Recording) -> str:
    text = f"{path}: {found.operators} operators; {found.wanted} asked for"
    if not found.in_time:
        return f"{text}, and more to come: run the command again to go on"
    if not found.missing:
        return f"{text}, all measured"
    names = ", ".join(sorted({target_of(key) for key in found.missing})[:SHOWN])
    return f"{text}, {len(found.missing)} of them not measured (refused, or too large): {names}"
