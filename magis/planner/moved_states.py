"""The forms of a step whose optimizer state is in host memory between updates."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from magis.fission.lower_bound import lower_bound
from magis.planner.subject import Subject
from magis.planner.update_lists import of_graph
from magis.rewrite.moved_state import first_states, movable_state, with_moved_state
from magis.search.budgeted_evaluator import Objective

SHARES = (0.25, 0.5, 1.0)
"""Shares of the state that are tried in host memory, in bytes."""


def with_state_on_host(subject: Subject, nbytes: int) -> Subject | None:
    """Return the subject with a step whose first states in the order of updates, of this many bytes at most, are in
    host memory; None without any. Cached."""
    return subject.memo.get(("state on host", nbytes), lambda: _with_state_on_host(subject, nbytes))


def _with_state_on_host(subject: Subject, nbytes: int) -> Subject | None:
    if subject.captured.behind is not None or subject.captured.sends:
        return None
    moved = first_states(subject.normal, nbytes)
    if not moved:
        return None
    found = of_graph(copy.copy(subject))
    vars(found)["normal"] = with_moved_state(subject.normal, moved)
    return found


def must_move_state(subject: Subject, goal: Objective) -> bool:
    """Return True if state may be in host memory, and no plan with all of it on the device keeps the memory limit."""
    if goal.memory_limit is None or not subject.host_limit:
        return False

    def on_device() -> int:
        costs = subject.costs({})
        return lower_bound(subject.untangled, costs.workspace, costs.rounding).nbytes

    least = subject.memo.get(("bound with state on the device",), on_device)
    return least > goal.memory_limit and with_state_on_host(subject, subject.host_limit) is not None


def forms_with_moved_state(subject: Subject, host_limit: int) -> Iterator[Subject]:
    """Yield the subject with rising shares of its state in host memory, of `host_limit` bytes at most."""
    whole = sum(subject.normal.storages[each].nbytes for each in movable_state(subject.normal))
    tried = set[int]()
    for share in SHARES:
        nbytes = min(int(share * whole), host_limit)
        found = None if nbytes in tried else with_state_on_host(subject, nbytes)
        tried.add(nbytes)
        if found is not None:
            yield found
