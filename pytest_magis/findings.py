"""The parts of a verdict: findings, tolerances, figures in words, and commands that accept them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from magis.results import Case
from magis.units import format_bytes
from pytest_magis.flags import CASE, MODELS, OPTIONS, RUN
from pytest_magis.option_values import PERMISSIONS

NEW, MOVED, BETTER, WORSE = PERMISSIONS
BROKEN = "broken"
"""Kind that nothing accepts."""


@dataclass(frozen=True)
class Tolerances:
    """Shares by which a figure may exceed its baseline: 0 is exact, 0.05 is five percent."""

    memory: float = 0.0
    latency: float = 0.04
    """Share for a timed latency ratio."""
    simulated_latency: float = 0.01
    """Share for a simulated latency, and for the ratio of two: these have no noise."""
    keeps_wins: bool = False
    """True: a case that needs less than its baseline is red until the win is stored."""
    needs_limits: bool = False
    """True: a case is red if no plan was found that meets its limit."""

    def of_latency(self, device: str) -> float:
        """Return the share for latency ratios on a device."""
        return self.simulated_latency if device.startswith("sim:") else self.latency


@dataclass(frozen=True)
class Finding:
    """A difference from the baseline or a limit, in one line; kind is NEW, MOVED, BETTER, WORSE or BROKEN."""

    kind: str
    text: str
    why: str = ""
    """The modules that grew, in one line; empty if unknown."""


@dataclass(frozen=True)
class Part:
    """A difference in full, and in brief as an addition to an earlier one of the same kind."""

    kind: str
    text: str
    brief: str


def moved(part: Part, mover: str) -> Part:
    """Turn a difference into one of kind MOVED if the ``mover`` (the planner, say) made it; without one keep it."""
    return Part(MOVED, f"{part.text}: moved by the {mover}", part.brief) if mover else part


def merge_parts(parts: Iterable[Part]) -> Iterator[Finding]:
    """Make one finding of each kind: its first part in full, the others in brief."""
    by_kind: dict[str, list[Part]] = {}
    for part in parts:
        by_kind.setdefault(part.kind, []).append(part)
    for kind, (first, *others) in by_kind.items():
        yield Finding(kind, "; ".join([first.text, *(part.brief for part in others)]))


def against(seen: int, allowed: int) -> str:
    """Write bytes beside the allowed ones, with the difference in percent."""
    return f"{seen:,} ({format_bytes(seen)}), allowed {allowed:,} ({format_bytes(allowed)}), {percent(seen, allowed)}"


def percent(seen: float, reference: float) -> str:
    """Write the difference of a figure from its reference in percent."""
    if not reference:
        return "was 0"
    share = 100 * float(Fraction(seen) / Fraction(reference) - 1)
    return f"{share:+.1f}%" if abs(share) >= 0.05 else f"{share:+.2g}%"


def accept_case(
    given: Iterable[tuple[str, str]], model: str, case: Case, needed: Sequence[str], where: str = ""
) -> str:
    """Write the command that runs this case alone and stores it.

    `given` are the options (flag, value) of the run, `where` is the node id of the user's test.
    """
    if where:
        return _command([where], given, (RUN, MODELS), needed)
    words = [f"--magis-models={model}", f"--magis-strategies={case.strategy}"]
    if case.search != "magis":
        words.append(f"--magis-search={case.search}")
    if case.memory_ratio is not None:
        words.append(f"--magis-memory-ratios={case.memory_ratio:.12g}")
    if case.latency_ratio is not None:
        words.append(f"--magis-latency-ratios={case.latency_ratio:.12g}")
    return _command(words, given, (RUN, MODELS, CASE), needed)


def accept_all(given: Iterable[tuple[str, str]], needed: Sequence[str], where: Iterable[str] = ()) -> str:
    """Write the command that repeats this run and stores all that it finds; `where` are the node ids of red tests."""
    files = dict.fromkeys(node_id.partition("::")[0] for node_id in where if node_id)
    return _command(files, given, (RUN,), needed)


def _command(
    words: Iterable[str], given: Iterable[tuple[str, str]], left_out: Collection[str], needed: Sequence[str]
) -> str:
    """Write a command with the given options but those of the scopes `left_out`."""
    declared = {option.flag: option for option in OPTIONS}
    kept = [(declared[flag], value) for flag, value in given if declared[flag].scope not in left_out]
    options = [f"{option.flag}={value}" if option.kind.metavar else option.flag for option, value in kept]
    return " ".join(["pytest", *map(shlex.quote, (*words, *options, f"--magis-update={','.join(needed)}"))])
