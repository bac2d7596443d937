"""Command `magis why`: what is at the peak of a training step, and what each known remedy would make of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from magis.cli.arguments import add_room, add_step, look_here, show, whole_number
from magis.errors import UsageError
from magis.progress import on_stderr, shown_if_slow

DESCRIPTION = """
Tell what is at the peak of a training step, by kind, module and line, and what to do about it: each known remedy
(checkpointing, a loss in chunks, accumulation, smaller types, 8-bit or moved state, LoRA, torch.compile, a plan), and
pairs of them, with the bytes and the time that the changed step needs on the device. Nothing of the model's size is
allocated. Exit code 1 where neither the step nor a remedy fits.
"""
NOTHING_FITS = 1


def add_why(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command `why` to the command line."""
    parser = commands.add_parser("why", help="what is at the peak, and what helps", description=DESCRIPTION)
    what = "package.module:factory, a registered name, or a marked test without arguments: test_file.py::test_name"
    parser.add_argument("model", metavar="MODEL", help=what)
    add_step(parser)
    add_room(parser)
    parser.add_argument("--remedies", metavar="NAMES", help="try these alone, separated by commas")
    parser.add_argument("--no-pairs", action="store_true", help="do not try pairs of remedies")
    parser.set_defaults(run=_why)


def _why(asked: argparse.Namespace) -> int:
    look_here()
    from magis.extensions.why.diagnosis import why

    with shown_if_slow(on_stderr(), "why") as progress:
        found = why(
            marked_test(asked.model) if "::" in asked.model else asked.model,
            device=asked.device,
            preset=asked.preset,
            dtype=asked.dtype,
            accumulate=whole_number("--accumulate", asked.accumulate) or 0,
            memory_limit=asked.memory_limit,
            allocator=asked.allocator,
            remedies=None if asked.remedies is None else asked.remedies.split(","),
            pairs=not asked.no_pairs,
            progress=progress,
        )
    for line in str(found).splitlines():
        show(line)
    return 0 if found.estimate.fits() or any(each.fits for each in found.remedies) else NOTHING_FITS


def marked_test(node: str) -> Callable[[], object]:
    """Return the function of a marked test, `test_file.py::test_name`, outside of pytest: without its fixtures and
    parameters, and without the options of its mark. Raises UsageError where there is none."""
    place, _, name = node.partition("::")
    path = Path(place)
    if not path.is_file():
        raise UsageError(f"{node}: there is no file {place}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{node}: {place} is no Python file")
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{node}: importing {place} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{node}: {place} has no function {name!r}", hint="name a test of the module, not of a class")
    found: Callable[[], object] = function
    return found
