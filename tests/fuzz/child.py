"""Judges scripts of seeds in a process of its own: `python -m tests.fuzz.child programs 0 100`.

A line for each seed before it is tried, one with what became of it after; a crash is then seen by the parent, as the
seed that was begun and not ended.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.fuzz.judge import Outcome, Seen, in_case, in_loop, trains
from tests.fuzz.loops import drawn_loop
from tests.fuzz.programs import drawn_program
from tests.fuzz.script import Script, printed
from tests.fuzz.shrink import shrunk

ORDER = ("equal", "refused", "wrong", "traceback")
WAYS = {
    "loop": in_loop,
    "plan": lambda script, seen: in_loop(script, seen, plan_seed=1),
    "case": lambda script, _seen: in_case(script),
}


def drawn(kind: str, seed: int) -> tuple[Script, list[Seen]]:
    """The script of a seed, and what eager mode makes of it."""
    return drawn_program(seed) if kind == "programs" else drawn_loop(seed)


def judged(kind: str, script: Script, seen: list[Seen]) -> list[tuple[str, Outcome]]:
    """What becomes of a script, by the way in which it ran."""
    found = [("loop", WAYS["loop"](script, seen))]
    if found[0][1].kind == "equal" and kind == "programs":
        found += [(way, WAYS[way](script, seen)) for way in ("plan", "case")]
    return found


def worst(outcomes: list[tuple[str, Outcome]]) -> tuple[str, Outcome]:
    """The outcome that says most against magis."""
    return max(outcomes, key=lambda pair: ORDER.index(pair[1].kind))


def smallest(script: Script, way: str, cause: str, seconds: float) -> Script:
    """The shortest script that fails in this way with this cause."""

    def fails(candidate: Script) -> bool:
        seen = trains(candidate)
        return seen is not None and alike(WAYS[way](candidate, seen).cause, cause)

    return shrunk(script, fails, seconds=seconds)


def alike(one: str, other: str) -> bool:
    """Whether two causes are of one kind: what differs counts, not where."""
    if one.startswith("wrong"):
        return _head(one) == _head(other)
    return one == other


def _head(cause: str) -> str:
    return cause.partition(" differs")[0].partition(": measured")[0]


def _warm_up(kind: str) -> None:
    """Load and compile all that seeds share, and keep the collector, which measuring bytes calls, away from it."""
    script, seen = drawn(kind, 0)
    judged(kind, script, seen)
    gc.collect()
    gc.freeze()


def _tell(row: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Judge the seeds that the command line names; with a number of seconds behind, shrink what fails."""
    kind, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    _warm_up(kind)
    for seed in range(first, last):
        _tell({"begin": seed})
        started = time.perf_counter()
        script, seen = drawn(kind, seed)
        outcomes = judged(kind, script, seen)
        way, outcome = worst(outcomes)
        redone = max(each.recomputed for _, each in outcomes)  # random plans recompute where a limit asks for nothing
        row = {**asdict(outcome), "recomputed": redone, "seed": seed, "way": way, "cause": outcome.cause, "source": ""}
        if outcome.kind != "equal":
            small = smallest(script, way, outcome.cause, seconds) if seconds and outcome.failed else script
            row["source"] = printed(small)
            if small is not script:
                row["detail"] = WAYS[way](small, trains(small) or []).detail
        row["seconds"] = time.perf_counter() - started
        _tell(row)


if __name__ == "__main__":
    main()
