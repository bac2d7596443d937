"""`magis estimate`: what a training step will need on a device, and what would make it fit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from magis.units import format_bytes

DESCRIPTION = """
Predict what a training step needs on a device: peak and reserved bytes, by kind and module, and whether it fits.
Where it does not, checkpointing, a plan and adapters (LoRA, where PEFT is installed) are tried. Nothing of the model's
size is allocated. Exit code 1 where the step does not fit.
"""
DOES_NOT_FIT = 1


def add_estimate(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = commands.add_parser("estimate", help="what a training step needs on a device", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="package.module:factory, or a registered name")
    parser.add_argument("--device", metavar="NAME", help="as --magis-device")
    parser.add_argument("--preset", metavar="NAME", help="as --magis-preset, of registered names")
    parser.add_argument("--dtype", metavar="NAME", help="as --magis-dtype")
    parser.add_argument("--memory-limit", metavar="BYTES", help='in place of the device\'s memory: "24 GiB"')
    parser.add_argument("--largest-batch", action="store_true", help="also the largest batch that fits")
    parser.add_argument("--no-remedies", action="store_true", help="do not try what would make it fit")
    parser.set_defaults(run=_estimate)


def _estimate(asked: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path.cwd()))  # a factory may lie where the command is given, as with `python -m`
    from magis import api

    found = api.estimate(
        asked.model, device=asked.device, preset=asked.preset, dtype=asked.dtype, memory_limit=asked.memory_limit
    )
    print(found)  # noqa: T201
    if not found.fits() and not asked.no_remedies:
        for remedy in found.remedies:
            verdict = "fits" if remedy.fits else "does not fit"
            print(  # noqa: T201
                f"{remedy.name}: {format_bytes(remedy.needed_bytes)}, {verdict}, "
                f"{remedy.latency_ratio:.2f} times the time ({remedy.how})"
            )
    if asked.largest_batch:
        print(f"largest batch that fits: {found.largest_batch() or 'none'}")  # noqa: T201
    return 0 if found.fits() else DOES_NOT_FIT
