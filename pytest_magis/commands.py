"""The commands that accept findings, written out so that a reader can paste them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from magis.results import Case

__all__ = ["accept_all", "accept_case"]

# decided by the case itself, or no part of what is accepted: a row that a cap in seconds stopped is never stored
_OF_THE_RUN = frozenset(
    (
        "--magis-update",
        "--magis-csv",
        "--magis-seconds",
        "--magis-pareto",
        "--magis-cache",
        "--magis-markdown",
        "--magis-report",
        "--magis-trace",
        "--magis-benchmark-json",
    )
)
_NOT_OF_TESTS = _OF_THE_RUN | {"--magis-models", "--magis-shard"}
_OF_THE_CASE = _OF_THE_RUN | {
    "--magis-models",
    "--magis-shard",
    "--magis-strategies",
    "--magis-search",
    "--magis-memory-ratios",
    "--magis-latency-ratios",
}


def accept_case(
    given: Iterable[tuple[str, str]], model: str, case: Case, needed: Sequence[str], where: str = ""
) -> str:
    """The command that runs this case alone and stores it; `given` are the options (flag, value) of the run, `where`
    the node id of a test of the user's."""
    if where:
        return _command([where], ((flag, value) for flag, value in given if flag not in _NOT_OF_TESTS), needed)
    words = [f"--magis-models={model}", f"--magis-strategies={case.strategy}"]
    if case.search != "magis":
        words.append(f"--magis-search={case.search}")
    if case.memory_ratio is not None:
        words.append(f"--magis-memory-ratios={case.memory_ratio:.12g}")
    if case.latency_ratio is not None:
        words.append(f"--magis-latency-ratios={case.latency_ratio:.12g}")
    return _command(words, ((flag, value) for flag, value in given if flag not in _OF_THE_CASE), needed)


def accept_all(given: Iterable[tuple[str, str]], needed: Sequence[str], where: Iterable[str] = ()) -> str:
    """The command of this run again, storing whatever it finds; `where` are the node ids of red tests."""
    files = dict.fromkeys(node_id.partition("::")[0] for node_id in where if node_id)
    return _command(files, ((flag, value) for flag, value in given if flag not in _OF_THE_RUN), needed)


def _command(words: Iterable[str], given: Iterable[tuple[str, str]], needed: Sequence[str]) -> str:
    options = [*words, *(f"{flag}={value}" for flag, value in given), f"--magis-update={','.join(needed)}"]
    return " ".join(["pytest", *map(shlex.quote, options)])
