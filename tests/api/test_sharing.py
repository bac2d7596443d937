"""Searches shared among processes and kept in a folder: the same front, whoever found its pieces and when."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from magis.planner.bench import Bench
from magis.planner.shared_searches import Sharing
from magis.planner.subject import Subject
from magis.results import Case
from magis.search.budgeted_evaluator import Objective, Over, PlanRequest, never
from magis.search.fission_pareto import DivisibleStep, FissionFront
from magis.search.loop_places import Findings, Share, divided_front, findings

PROJECTED = "tests.api.nets:projected"
WANTED = PlanRequest(Objective(memory_limit=0), 0)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Bench().subject(Case(PROJECTED, "magis", "sim:rtx3090", "small"))


@pytest.fixture(scope="module")
def alone(subject: Subject) -> FissionFront:
    return front(subject, None)


def front(subject: Subject, share: Share | None) -> FissionFront:
    return divided_front(subject.untangled, subject.roofline, WANTED, reuse=True, share=share)


@pytest.fixture(scope="module")
def pieces(subject: Subject) -> list[Findings]:
    """What every place has: computed once, so that tests of files are quick."""
    found: dict[int, Findings] = {}

    def computed(work: DivisibleStep, number: int, over: Over = never) -> Findings:
        return found.setdefault(number, findings(work, number))

    front(subject, lambda work, numbers, _over: (computed(work, number) for number in numbers))
    return [found[number] for number in sorted(found)]


def kept(folder: Path, pieces: list[Findings]) -> Sharing:
    return Sharing(folder=folder, compute=lambda _work, number, _over=never: pieces[number])


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def largest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda each: each.stat().st_size)


def same(one: FissionFront, other: FissionFront) -> bool:
    if (one.states, len(one.points)) != (other.states, len(other.points)):
        return False
    return all(
        (a.peak, a.latency_ns, a.cut) == (b.peak, b.latency_ns, b.cut)
        and np.array_equal(a.plan.flags, b.plan.flags)
        and np.array_equal(a.plan.order, b.plan.order)
        and a.solution().peak == b.solution().peak
        for a, b in zip(one.points, other.points, strict=True)
    )


def dying(work: DivisibleStep, number: int, over: Over = never) -> Findings:
    """The second place takes its worker with it."""
    if number == 1 and multiprocessing.parent_process() is not None:
        os._exit(9)
    return findings(work, number, over)


def refusing(_work: DivisibleStep, number: int, over: Over = never) -> Findings:
    raise AssertionError(f"place {number} was computed again")


def test_two_processes_find_the_same_front(subject: Subject, alone: FissionFront) -> None:
    assert alone.points
    assert same(front(subject, Sharing(processes=2)), alone)


def test_a_worker_that_dies_leaves_its_work_to_this_process(subject: Subject, alone: FissionFront) -> None:
    with pytest.warns(RuntimeWarning, match="a worker process died"):
        assert same(front(subject, Sharing(processes=2, compute=dying)), alone)


def test_workers_end_with_the_search(subject: Subject, pieces: list[Findings]) -> None:
    before = {child.pid for child in multiprocessing.active_children()}
    workers: set[int] = set()
    calls: list[bool] = []

    def over() -> bool:
        workers.update(child.pid for child in multiprocessing.active_children() if child.pid not in before)  # type: ignore[misc]
        calls.append(bool(workers))  # before there are any, this process looks at the first place itself
        return sum(calls) > 3

    cut_short = divided_front(
        subject.untangled,
        subject.roofline,
        PlanRequest(Objective(memory_limit=0), 0, over=over),
        reuse=True,
        share=Sharing(2),
    )
    # The processes themselves: the executor's thread may be about to note that one of them has ended.
    assert len(workers) == 2
    assert not [worker for worker in workers if running(worker)]
    assert cut_short.states < sum(piece.states for piece in pieces)


def test_a_worker_ends_with_the_process_that_asked(tmp_path: Path) -> None:
    program = tmp_path / "asks.py"
    program.write_text(
        """
import multiprocessing, os, signal
from magis.planner.shared_searches import _prepared

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Pool(1, initializer=_prepared)
    print(worker.apply(os.getpid), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False)
    worker = int(done.stdout)
    for _ in range(600):
        if not running(worker):
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {worker} outlived the process that asked")


def test_what_was_found_is_not_searched_again(
    subject: Subject, alone: FissionFront, pieces: list[Findings], tmp_path: Path
) -> None:
    folder = tmp_path / "made/when/needed"
    assert same(front(subject, kept(folder, pieces)), alone)
    assert same(front(subject, Sharing(folder=folder, compute=refusing)), alone)
    assert [path.suffix for path in folder.iterdir()] == [".txt"] * len(pieces)


def test_a_search_that_was_cut_off_goes_on(
    subject: Subject, alone: FissionFront, pieces: list[Findings], tmp_path: Path
) -> None:
    third = len(pieces) - 3  # late places come first

    def failing(_work: DivisibleStep, number: int, over: Over = never) -> Findings:
        if number == third:
            raise KeyboardInterrupt
        return pieces[number]

    def rest(_work: DivisibleStep, number: int, over: Over = never) -> Findings:
        assert number <= third
        return pieces[number]

    with pytest.raises(KeyboardInterrupt):
        front(subject, Sharing(folder=tmp_path, compute=failing))
    assert len(list(tmp_path.iterdir())) == 2
    assert same(front(subject, Sharing(folder=tmp_path, compute=rest)), alone)


def test_a_damaged_file_is_made_again(
    subject: Subject, alone: FissionFront, pieces: list[Findings], tmp_path: Path
) -> None:
    front(subject, kept(tmp_path, pieces))
    path = largest(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.warns(RuntimeWarning, match=r"\.txt is not used, and made again"):
        assert same(front(subject, kept(tmp_path, pieces)), alone)
    assert path.read_bytes() == whole
