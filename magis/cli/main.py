"""The command `magis` and its sub-commands; user errors print one line and exit with code 4."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from magis import __version__, registry
from magis.child_process import terminated_in_order
from magis.cli.arguments import above_zero, add_room, add_step, look_here, real_number, show, tell, whole_number
from magis.cost.profile_store import target_of
from magis.errors import CaptureError, MagisError, UsageError, nearest
from magis.models.model_specs import resolve
from magis.progress import on_stderr, shown_if_slow
from magis.quiet import before_torch
from magis.report import write_text_atomically
from magis.report.results_table import case_name, merge_results
from magis.units import aligned, format_bytes, format_milliseconds

if TYPE_CHECKING:
    from magis.frontends.fitting import Fit

USAGE_ERROR = 4
"""Exit code for user errors, equal to pytest's."""
FAILED, INTERRUPTED = 1, 130

Commands: TypeAlias = "argparse._SubParsersAction[Any]"  # noqa: SLF001 (argparse has no other name for it)


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises UsageError instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; arguments default to those of the process."""
    parser = _Parser(prog="magis", description="Memory of PyTorch training steps: tools beside the pytest plugin.")
    parser.add_argument("--version", action="version", version=f"magis {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    further = registry.names("command")
    for add in (_add_profile, _add_merge, _add_fit, _add_estimate, *registry.present("command")):
        add(commands)
    # argparse drops arguments behind "--" if an option precedes it
    cut = given.index("--") if "--" in given and given[0] in further else len(given)
    try:
        if given and given[0] in further:
            registry.load("command", given[0])  # raises if its neighbour is not installed
        asked, unknown = parser.parse_known_args(given[:cut], argparse.Namespace(behind=given[cut + 1 :]))
        if unknown:
            command = commands.choices.get(given[0], parser)
            flags = sorted(set(re.findall(r"--(?!magis)[a-z-]+", command.format_help())))
            raise UsageError(f"{command.prog} takes no {unknown[0]!r}", hint=nearest(unknown[0], flags))
        before_torch()
        with terminated_in_order():
            return int(asked.run(asked))
    except (UsageError, CaptureError) as error:
        tell(f"ERROR: {error}")
        return USAGE_ERROR
    except MagisError as error:
        tell(f"ERROR: {error}")
        return FAILED
    except KeyboardInterrupt:
        tell("interrupted")
        return INTERRUPTED


def _add_model(commands: Commands, name: str, text: str, description: str) -> argparse.ArgumentParser:
    """Add a sub-command for one model, with the common options, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    parser.add_argument("model", metavar="MODEL", help="package.module:factory, or a registered name")
    add_step(parser)
    parser.add_argument("--compiled", nargs="?", const="model", choices=("model", "loss", "step"), help="compiled")
    return parser


# `magis fit`: the largest batch, or sequence, that fits a memory limit: in eager mode, and optimized.

FIT_DESCRIPTION = """
Find the largest size of a model whose training step fits a memory limit. The size is that of a dimension of the batch,
or a keyword that the factory takes. Nothing of that size is allocated, unless --run asks for a measurement.
"""
NOTHING_FITS = 1
HEADER = ("strategy", "size", "peak", "measured", "step", "latency ratio")


def _add_fit(commands: Commands) -> None:
    parser = _add_model(commands, "fit", "the largest batch that fits a memory limit", FIT_DESCRIPTION)
    parser.add_argument("--memory-limit", metavar="BYTES", required=True, help='such as "8 GiB", or a card: rtx4090')
    parser.add_argument("--allocator", metavar="CONF", help="limit reserved bytes: settings as in PYTORCH_ALLOC_CONF")
    parser.add_argument("--dim", metavar="N", help="the dimension of the batch to vary (default: 0)")
    parser.add_argument("--keyword", metavar="NAME", help="vary this keyword of the factory instead")
    parser.add_argument("--latency-ratio", metavar="R", help="the most that the optimized step may take, times eager's")
    parser.add_argument("--host-limit", metavar="BYTES", default="0", help="most optimizer state in host memory")
    parser.add_argument("--budget", metavar="STATES", help="work of each search, in plans evaluated")
    parser.add_argument("--most", metavar="N", help="the largest size to try (default: 1048576)")
    parser.add_argument("--precision", metavar="SHARE", help="how close the optimized size must be (default: 0.02)")
    parser.add_argument("--run", action="store_true", dest="measured", help="measure the answers, where they fit")
    parser.set_defaults(run=_fit)


def _fit(asked: argparse.Namespace) -> int:
    look_here()
    from magis import api

    given: dict[str, Any] = {
        "most": whole_number("--most", asked.most),
        "precision": real_number("--precision", asked.precision),
    }
    dim, latency_ratio = whole_number("--dim", asked.dim) or 0, real_number("--latency-ratio", asked.latency_ratio)
    budget = whole_number("--budget", asked.budget)
    with shown_if_slow(on_stderr(), "fit") as progress:
        found = api.fit(
            asked.model,
            memory_limit=asked.memory_limit,
            device=asked.device,
            preset=asked.preset,
            dtype=asked.dtype,
            dim=dim,
            keyword=asked.keyword,
            latency_ratio=latency_ratio,
            budget=budget,
            allocator=asked.allocator,
            run=asked.measured,
            compiled=asked.compiled or False,
            accumulate=whole_number("--accumulate", asked.accumulate) or 0,
            host_limit=asked.host_limit,
            progress=progress,
            **{name: amount for name, amount in given.items() if amount is not None},  # the others have defaults
        )
    for line in _table(found, compiled=asked.compiled is not None):
        show(line)
    return NOTHING_FITS if found.eager is None and found.magis is None else 0


def _table(found: Fit, *, compiled: bool = False) -> Iterator[str]:
    """Yield the lines of the output: a header, a table of both strategies or of the compiled step, notes."""
    of = "" if found.allocator is None else f" reserved with {found.allocator or 'the default allocator'}"
    yield f"{found.model} on {found.device}, {found.dtype}, {found.what}, at most {format_bytes(found.limit_bytes)}{of}"
    rows = [HEADER if found.allocator is None else tuple("reserved" if name == "peak" else name for name in HEADER)]
    steps = (("compiled", found.eager),) if compiled else (("eager", found.eager), ("magis", found.magis))
    for name, point in steps:
        if point is None:
            rows.append((name, "none", "-", "-", "-", "-"))
            continue
        measured = "-" if point.measured_bytes is None else format_bytes(point.measured_bytes)
        step = format_milliseconds(point.latency_ms)
        peak = format_bytes(point.reserved_bytes or point.peak_bytes)
        rows.append((name, str(point.size), peak, measured, step, f"{point.latency_ratio:.3f}"))
    yield from aligned(rows, left=(0,))
    if found.refused:
        yield f"the model takes no larger size: {found.refused}"
    elif found.bound is not None:
        larger = found.bound < found.most
        yield (
            f"no plan can fit beyond {found.bound}" if larger else f"not looked at: sizes beyond {found.most} (--most)"
        )
    if not found.is_monotone:
        yield "note: memory does not grow with every size here: a size between those that were tried may fit as well"


# `magis estimate`: what a training step will need on a device, and what would make it fit.

ESTIMATE_DESCRIPTION = """
Predict what a training step needs on a device: peak and reserved bytes, by kind and module, and whether it fits.
Where it does not, checkpointing, a plan and adapters (LoRA) are tried. Nothing of the model's
size is allocated. Exit code 1 where the step does not fit.
"""
DOES_NOT_FIT = 1


def _add_estimate(commands: Commands) -> None:
    parser = _add_model(commands, "estimate", "what a training step needs on a device", ESTIMATE_DESCRIPTION)
    add_room(parser)
    parser.add_argument("--largest-batch", action="store_true", help="also the largest batch that fits")
    parser.add_argument("--no-remedies", action="store_true", help="do not try what would make it fit")
    parser.set_defaults(run=_estimate)


def _estimate(asked: argparse.Namespace) -> int:
    look_here()
    from magis import api

    with shown_if_slow(on_stderr(), "estimate") as progress:
        progress("capturing the step")
        found = api.estimate(
            asked.model,
            device=asked.device,
            preset=asked.preset,
            dtype=asked.dtype,
            memory_limit=asked.memory_limit,
            allocator=asked.allocator,
            compiled=asked.compiled or False,
            accumulate=whole_number("--accumulate", asked.accumulate) or 0,
        )
    print(found)  # noqa: T201
    if not found.fits() and not asked.no_remedies:
        with shown_if_slow(on_stderr(), "estimate") as progress:
            progress("trying what would make it fit")
            remedies = found.remedies
        for remedy in remedies:
            verdict = "fits" if remedy.fits else "does not fit"
            show(
                f"{remedy.name}: {format_bytes(remedy.needed_bytes)}, {verdict}, "
                f"{remedy.latency_ratio:.2f} times the time ({remedy.how})"
            )
    if asked.largest_batch:
        with shown_if_slow(on_stderr(), "estimate") as progress:
            progress("looking for the largest batch that fits")
            largest = found.largest_batch()
        show(f"largest batch that fits: {largest or 'none'}")
    return 0 if found.fits() else DOES_NOT_FIT


# `magis profile`: operators measured on this machine.

PROFILE_DESCRIPTION = """
Measure every distinct operator of the models, the sizes that fission asks for included: median time of repeated calls
with cold caches, and scratch memory. What the file knows already is not measured again, and it is replaced after every
batch: a run that was cut off goes on where it was. Simulated devices (sim:<name>) use baselines/profiles/<name>.json.
"""
UNFINISHED = 3
"""Exit code of a recording stopped by --seconds."""
SHOWN = 3
"""Maximum number of unmeasured operators to name."""


def _add_profile(commands: Commands) -> None:
    parser = commands.add_parser("profile", help="measure operators on this machine", description=PROFILE_DESCRIPTION)
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (default: cuda where there is a GPU)")
    parser.add_argument("--models", metavar="NAMES", default="all", help="as --magis-models (default: all)")
    parser.add_argument("--dtype", metavar="NAMES", help="data types, by commas (default: each model's own)")
    parser.add_argument("--preset", metavar="NAME", help="small or paper (default: small on cpu, else paper)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="default: baselines/profiles/<device>.json")
    parser.add_argument("--seconds", metavar="S", help="stop after so many; the next run goes on")
    parser.add_argument("--no-parts", action="store_true", help="leave out the sizes of fission")
    parser.add_argument("--threads", metavar="N", help="threads of the CPU's kernels (default: as torch has them)")
    parser.set_defaults(run=_profile)


def _profile(asked: argparse.Namespace) -> int:
    look_here()
    seconds = above_zero("--seconds", asked.seconds)
    threads = above_zero("--threads", asked.threads, whole=True)
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
    with shown_if_slow(on_stderr(), "profile") as progress:
        found = api.record_profile(
            path,
            models,
            device=device,
            preset=asked.preset or ("small" if device == "cpu" else "paper"),
            dtypes=dtypes,
            parts=not asked.no_parts,
            seconds=seconds,
            progress=progress,
        )
    said = f"{path}: {found.operators} operators; {found.wanted} asked for"
    if not found.in_time:
        said += ", and more to come: run the command again to go on"
    elif found.missing:
        names = ", ".join(sorted({target_of(key) for key in found.missing})[:SHOWN])
        said += f", {len(found.missing)} of them not measured (refused, or too large): {names}"
    else:
        said += ", all measured"
    show(said)
    return 0 if found.in_time else UNFINISHED


# `magis merge`: the results of several machines as one file, and whether any case is red.

MERGE_DESCRIPTION = """
Join the results of runs that shared a list of models (--magis-shard), say how many cases are green and red, and name
the red ones. Exit code 1 if there is a red one, 4 for files that are no results or contradict each other.
"""
RED = 1


def _add_merge(commands: Commands) -> None:
    parser = commands.add_parser("merge", help="join the results of several runs", description=MERGE_DESCRIPTION)
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="results.csv of a run")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="where to write all rows (default: nowhere)")
    parser.set_defaults(run=_merge)


def _merge(asked: argparse.Namespace) -> int:
    merged = merge_results(asked.files)
    if asked.out is not None:
        write_text_atomically(asked.out, merged.text())
    for row in merged.red:
        said = f": {row['note']}" if row.get("note") else ""
        show(f"{row['verdict']}  {case_name(row)}{said}")
    count, red = len(merged.rows), len(merged.red)
    where = f"{asked.out}: " if asked.out is not None else ""
    show(f"{where}{count} cases of {len(asked.files)} files, {count - red} green, {red} red")
    return RED if red else 0
