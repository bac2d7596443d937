"""The parts of a verdict: findings, tolerances, figures in words, and the shell commands that accept a finding."""

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
"""Kind of a finding that no option accepts."""


@dataclass(frozen=True)
class Tolerances:
    """Relative tolerances over the baseline: 0 is exact, 0.05 allows 5% more."""

    memory: float = 0.0
    latency: float = 0.04
    """Tolerance for a timed latency ratio."""
    simulated_latency: float = 0.01
    """Tolerance for a simulated latency, and for the ratio of two; simulated latencies have no noise."""
    keeps_wins: bool = False
    """If True, a case that needs less than its baseline is red until the improvement is stored."""
    needs_limits: bool = False
    """If True, a case is red unless a plan meets its limit."""

    def of_latency(self, device: str) -> float:
        """Return the tolerance for latency ratios on a device."""
        return self.simulated_latency if device.startswith("sim:") else self.latency


@dataclass(frozen=True)
class Finding:
    """Difference from the baseline or a limit, as one line; kind is NEW, MOVED, BETTER, WORSE or BROKEN."""

    kind: str
    text: str
    why: str = ""
    """The modules that grew, in one line; empty if unknown."""
    line: str = ""
    """Line of the user's code that made the largest of the tensors that grew ("net.py:31"); empty if unknown."""


@dataclass(frozen=True)
class Part:
    """Single difference: a full text, and a brief one for use after another difference of the same kind."""

    kind: str
    text: str
    brief: str


def moved(part: Part, mover: str) -> Part:
    """Return the difference as MOVED if the ``mover`` (such as the planner) is not empty, else unchanged."""
    return Part(MOVED, f"{part.text}: moved by the {mover}", part.brief) if mover else part


def merge_parts(parts: Iterable[Part]) -> Iterator[Finding]:
    """Yield one finding per kind: its first difference in full, the others in brief."""
    by_kind: dict[str, list[Part]] = {}
    for part in parts:
        by_kind.setdefault(part.kind, []).append(part)
    for kind, (first, *others) in by_kind.items():
        yield Finding(kind, "; ".join([first.text, *(part.brief for part in others)]))


def against(seen: int, allowed: int) -> str:
    """Return measured and allowed bytes as text, with the difference in percent."""
    return f"{seen:,} ({format_bytes(seen)}), allowed {allowed:,} ({format_bytes(allowed)}), {percent(seen, allowed)}"


def percent(seen: float, reference: float) -> str:
    """Return the relative difference of a figure from its reference as text, in percent."""
    if not reference:
        return "was 0"
    share = 100 * float(Fraction(seen) / Fraction(reference) - 1)
    return f"{share:+.1f}%" if abs(share) >= 0.05 else f"{share:+.2g}%"


def accept_case(
    given: Iterable[tuple[str, str]], model: str, case: Case, needed: Sequence[str], where: str = ""
) -> str:
    """Return the command that runs one case alone and stores its result.

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
    """Return the command that repeats this run and stores all its findings; `where` are the node ids of red tests."""
    files = dict.fromkeys(node_id.partition("::")[0] for node_id in where if node_id)
    return _command(files, given, (RUN,), needed)


def _command(
    words: Iterable[str], given: Iterable[tuple[str, str]], left_out: Collection[str], needed: Sequence[str]
) -> str:
    """Return a pytest command with the given options, except those whose scope is in `left_out`."""
    declared = {option.flag: option for option in OPTIONS}
    kept = [(declared[flag], value) for flag, value in given if declared[flag].scope not in left_out]
    options = [f"{option.flag}={value}" if option.kind.metavar else option.flag for option, value in kept]
    return " ".join(["pytest", *map(shlex.quote, (*words, *options, f"--magis-update={','.join(needed)}"))])
