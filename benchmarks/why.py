"""Remedies that others reported, beside those that `magis.why` names: `python benchmarks/why.py [--cases 0,3]`.

For each of ten published outcomes (lib/published_remedies.py): the place of the remedy that helped in the list, and its
bytes beside the published ones; "without" is its place without our plan. The bar: among the first two in nine, bytes
within 15% in seven. Two of the networks are made by transformers, from configurations. A case takes minutes: `--cases`
names some, from 0 on. With `--alone` only the remedy that helped is tried, for its bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from lib.published_remedies import OUTCOMES, Outcome
from lib.published_second import ALLOCATED

import magis
from magis.frontends.estimating import Remedy
from magis.planner.subject import Subject
from magis.progress import on_stderr, shown_if_slow
from magis.units import MIB

WITHIN, FIRST, OF_PLACE, OF_BYTES = 0.15, 2, 9, 7
SHOWN, LAST = 4, 99
RESULTS = Path(__file__).parent / "results" / "why.txt"


def main() -> int:
    """Print the table; 1 where a bar is missed."""
    parser = arguments(__doc__, cases="", alone=False, output=RESULTS)
    given = parser.parse_args()
    chosen = [OUTCOMES[int(each)] for each in given.cases.split(",")] if given.cases else OUTCOMES
    places: list[tuple[int, int]] = []
    errors: list[float] = []
    # Running these steps takes a CPU minutes in bfloat16, and changes no figure: it is for steps that read data.
    with mock.patch.object(Subject, "conformance", "left out"):
        printed(_lines(chosen, places, errors, alone=given.alone), given.output)
    return 0 if sum(place <= FIRST for place, _ in places) >= OF_PLACE and _close(errors) >= OF_BYTES else 1


def _close(errors: list[float]) -> int:
    return sum(abs(each) <= WITHIN for each in errors)


def _lines(
    chosen: tuple[Outcome, ...] | list[Outcome],
    places: list[tuple[int, int]],
    errors: list[float],
    *,
    alone: bool,
) -> Iterator[str]:
    """The lines of the table; ``places`` and ``errors`` get those of its rows."""
    yield from head("MiB")
    columns = f"{'before':>8}{'publ.':>8}{'after':>8}{'publ.':>8}{'error':>8}{'place':>7}{'without':>8}{'s':>6}"
    yield f"{'step':42}{'remedy':14}{'counts':>10}{columns}"
    for outcome in chosen:
        started = time.perf_counter()
        with shown_if_slow(on_stderr(), "why") as progress:
            found = magis.why(
                outcome.make, device=outcome.device, allocator="", pairs=False, progress=progress,
                remedies=[outcome.remedy] if alone else None, **outcome.keywords,
            )  # fmt: skip
        remedy = found.remedy(outcome.remedy)
        before = _counted(outcome, found.estimate.peak_bytes, found.estimate.needed_bytes)
        after = _counted(outcome, remedy.peak_bytes, remedy.needed_bytes)
        errors.append(after / outcome.after - 1)
        singles = found.remedies
        families = [_family(each) for each in singles]
        place = families.index(_family(remedy)) + 1 if _family(remedy) in families else LAST
        if not alone:
            places.append((place, place - ("magis" in families[: place - 1])))
        placed = f"{'-':>7}{'-':>8}" if alone else f"{place:7}{places[-1][1]:8}"
        was = "OOM" if outcome.before is None else f"{outcome.before / MIB:.0f}"
        seconds = time.perf_counter() - started
        yield (
            f"{outcome.title:42}{outcome.remedy:14}{outcome.counts:>10}{before / MIB:8.0f}{was:>8}{after / MIB:8.0f}"
            f"{outcome.after / MIB:8.0f}{errors[-1]:+8.1%}{placed}{seconds:6.0f}"
        )
        for at, each in enumerate(singles[: max(SHOWN, place)], 1):
            fits = "fits" if each.fits else "too much"
            yield (
                f"{'':8}{at}. {each.name:22}{each.needed_bytes / found.estimate.needed_bytes:6.2f} of the bytes, "
                f"{each.latency_ratio:5.2f} of the time, {fits}"
            )
        yield from (f"{'':8}not priced: {name}: {why}" for name, why in found.refused)
        yield f"{'':8}{outcome.source}"
    near, without = (sum(each[at] <= FIRST for each in places) for at in (0, 1))
    yield f"among the first {FIRST}: {near} of {len(places)}, without our plan {without} (bar: {OF_PLACE} of 10)"
    yield f"bytes within {WITHIN:.0%}: {_close(errors)} of {len(errors)} (bar: {OF_BYTES} of 10)"


def _family(remedy: Remedy) -> str:
    return remedy.name.removeprefix("selective-").rstrip("0123456789")


def _counted(outcome: Outcome, peak_bytes: int, needed_bytes: int) -> int:
    """What the published figure counts."""
    return (peak_bytes if outcome.counts == ALLOCATED else needed_bytes) + outcome.more_bytes


if __name__ == "__main__":
    sys.exit(main())
