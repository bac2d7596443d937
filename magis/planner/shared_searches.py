"""Pieces of a search shared among processes, and kept in a folder so that a search that was cut off goes on.

A piece is one place of a step (``magis.search.fission_pareto``). Who computes it, in which order and when, changes
nothing of the result. A worker that dies leaves its pieces to this process; a file that is not whole is made again. No
worker outlives the search that it works for, nor the process that asked.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import threading
import warnings
import zipfile
import zlib
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Protocol

import numpy as np

from magis.errors import UsageError
from magis.graph import digest
from magis.report.text_store import code_digest, write_bytes_atomically
from magis.search.budgeted_evaluator import JudgedPlan, Over, never
from magis.search.fission_pareto import DivisibleStep, Findings, LoopPlace, PointRecord, findings
from magis.simulate.problem import DROP, Int8s, Int32s

FORMAT = 1
Table = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
DIMENSIONS = {"states": 1, "cut": 2} | {
    f"{plan} {what}": 2 for plan in ("plan", "body") for what in ("costs", "flags", "order")
}
MOST_BYTES = 1 << 28
"""Of a file's arrays: the largest steps need a hundredth."""
POLL_S = 0.2
# all that numpy and zipfile raise for files that are not what they seem
BROKEN = (
    OSError, ValueError, LookupError, EOFError, TypeError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error
)  # fmt: skip


class Compute(Protocol):
    """``magis.search.fission_pareto.findings``, or what stands for it."""

    def __call__(self, work: DivisibleStep, number: int, over: Over = never) -> Findings: ...


@dataclass(frozen=True)
class Sharing:
    """How many processes work on a search, and the folder (made when needed) of what they have found; None: nowhere.

    More than one process needs a main module that can be imported again, as ``multiprocessing`` does.
    """

    processes: int = 1
    folder: Path | None = None
    compute: Compute = findings

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise UsageError(f"a search needs at least 1 process, not {self.processes}")

    @property
    def needed(self) -> bool:
        """Whether there is anything to share or to keep."""
        return self.processes > 1 or self.folder is not None

    def __call__(self, work: DivisibleStep, numbers: Sequence[int], over: Over) -> Generator[Findings, None, None]:
        """The findings of the places, in their order, until ``over`` ends them."""
        store = None if self.folder is None else _Store(self.folder, _key(work))
        known = {} if store is None else {n: found for n in numbers if (found := store.load(n)) is not None}
        missing = [number for number in numbers if number not in known]
        with ExitStack() as stack:
            futures = self._futures(work, missing, stack)
            for number in numbers:
                found = known.get(number)
                if found is None:
                    found = self._computed(work, number, futures.get(number), over)
                    if store is not None and found is not None and not over():  # else it may be incomplete
                        store.save(number, found)
                if found is None:
                    return
                yield found

    def _futures(self, work: DivisibleStep, missing: Sequence[int], stack: ExitStack) -> dict[int, Future[Findings]]:
        workers = min(self.processes, len(missing))
        if workers < 2:
            return {}
        before = set(active_children())
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_prepared)

        def end() -> None:
            pool.shutdown(wait=False, cancel_futures=True)
            ours = [child for child in active_children() if child not in before]
            for child in ours:
                child.terminate()
            for child in ours:
                child.join()

        stack.callback(end)
        return {number: pool.submit(self.compute, work, number) for number in missing}

    def _computed(
        self, work: DivisibleStep, number: int, future: Future[Findings] | None, over: Over
    ) -> Findings | None:
        """None where ``over`` came before a worker's answer."""
        while future is not None:
            try:
                return future.result(timeout=POLL_S)
            except NotYet:
                if over():
                    return None
            except BrokenProcessPool:
                text = "a worker process died: its part of the search is done here"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                break
        return self.compute(work, number, over)


def _prepared() -> None:
    """A worker leaves Ctrl-C to the process that asked, and ends with it, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _key(work: DivisibleStep) -> str:
    """What findings depend on: the step, its costs, where it may be cut, and the code that searches."""
    found = hashlib.sha256(f"{FORMAT} {digest(work.graph)} {work.costs!r} {work.reuse} {work.efforts}".encode())
    for place in work.places:
        found.update(f"{place.at} {sorted(place.cuts.items())}".encode())
    found.update(code_digest().encode())
    return found.hexdigest()[:24]


@dataclass(frozen=True)
class _Store:
    """Findings as arrays of whole numbers, one file a place: ``<key>-<place>.npz``."""

    folder: Path
    key: str

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.key}-{number}.npz"

    def load(self, number: int) -> Findings | None:
        """None if there is no such file, or none that can be trusted."""
        path = self._path(number)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
        with suppress(*BROKEN):
            return _findings(_read(content), number)
        warnings.warn(f"{path} is damaged: that part of the search is done again", RuntimeWarning, stacklevel=2)
        return None

    def save(self, number: int, found: Findings) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write {self.folder}: {error.strerror or error}") from error
        stream = io.BytesIO()
        np.savez_compressed(stream, allow_pickle=False, **_arrays(found))
        write_bytes_atomically(self._path(number), stream.getvalue())


def _read(content: bytes) -> dict[str, Table]:
    """The arrays of a file; one of the errors ``BROKEN`` for anything else."""
    with zipfile.ZipFile(io.BytesIO(content)) as members:
        if sum(member.file_size for member in members.infolist()) > MOST_BYTES:
            raise ValueError("more than any step needs")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        tables = {name: np.array(arrays[name]) for name in DIMENSIONS}
    for name, dimensions in DIMENSIONS.items():
        if tables[name].dtype != np.int64 or tables[name].ndim != dimensions:
            raise ValueError("arrays of another kind")
    return tables


def _arrays(found: Findings) -> dict[str, Table]:
    points = found.points
    arrays = {
        "states": np.array([found.states]),
        "cut": np.array([(point.cut.at, point.cut.parts) for point in points]).reshape(len(points), 2),
    }
    for name in ("plan", "body"):
        plans: list[JudgedPlan] = [getattr(point, name) for point in points]
        arrays[f"{name} costs"] = np.array([(plan.peak, plan.latency_ns) for plan in plans]).reshape(len(points), 2)
        arrays[f"{name} flags"] = _ragged([plan.flags for plan in plans])
        arrays[f"{name} order"] = _ragged([plan.order for plan in plans])
    return {name: array.astype(np.int64) for name, array in arrays.items()}


def _ragged(rows: Sequence[Int32s | Int8s]) -> Table:
    """Rows of different lengths, each behind its length, filled up with zeros."""
    width = max((len(row) for row in rows), default=0)
    table = np.zeros((len(rows), width + 1), dtype=np.int64)
    for place, row in enumerate(rows):
        table[place, 0] = len(row)
        table[place, 1 : 1 + len(row)] = row
    return table


def _findings(arrays: Mapping[str, Table], number: int) -> Findings:
    """The way back; ValueError or KeyError for arrays that are nobody's findings."""
    points = []
    for row, (at, parts) in enumerate(arrays["cut"].tolist()):
        plan, body = _plan(arrays, "plan", row), _plan(arrays, "body", row)
        points.append(PointRecord(LoopPlace(at, parts, number), plan, body))
    return Findings(tuple(points), int(arrays["states"][0]))


def _plan(arrays: Mapping[str, Table], name: str, row: int) -> JudgedPlan:
    peak, latency_ns = arrays[f"{name} costs"][row].tolist()
    flags, order = (_row(arrays[f"{name} {what}"], row) for what in ("flags", "order"))
    if not np.array_equal(np.sort(order), np.arange(len(order))):
        raise ValueError("an order that misses operators")
    if len(flags) and not 0 <= flags.min() <= flags.max() <= DROP:
        raise ValueError("an unknown decision")
    return JudgedPlan(order.astype(np.int32), flags.astype(np.int8), peak, latency_ns)


def _row(table: Table, row: int) -> Table:
    count = int(table[row, 0])
    if not 0 <= count < table.shape[1]:
        raise ValueError("a row of a wrong length")
    return table[row, 1 : 1 + count]
