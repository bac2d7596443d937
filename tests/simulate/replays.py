"""A schedule walked event by event, slow and obviously right: its bytes, and its time on all streams."""

from __future__ import annotations

from dataclasses import dataclass, field

from magis.simulate.problem import ARRIVE, BLOCK, FIRST, LOAD, REDO, STORE, WAIT, Events, Problem
from tests.simulate.plans import copy_ns


@dataclass
class Copy:
    storage: int
    birth: int
    uses: list[int] = field(default_factory=list)
    waited: int | None = None
    under_way: bool = False

    def death(self, problem: Problem, count: int) -> int:
        """Last event at which it is in memory."""
        if self.waited is not None:
            return self.waited - 1
        if problem.to_end[self.storage]:
            return count
        return max([self.birth, *self.uses])


@dataclass(frozen=True)
class Replayed:
    peak: int
    tensor_peak: int
    latency_ns: int
    stalled_ns: int
    levels: list[int]


def replay(problem: Problem, events: Events) -> Replayed:
    """Walk a schedule as a machine would, with a check at every step that what is read is there."""
    copies: list[Copy] = []
    current: dict[int, Copy] = {}
    unwanted: dict[int, int] = {}  # bytes of outputs that die at once, by event
    for at in range(len(events)):
        kind, arg = int(events.kind[at]), int(events.arg[at])
        reads: list[int] = []
        if kind in (FIRST, REDO):
            reads = problem.inputs(arg).tolist()
        elif kind == BLOCK:
            reads = problem.block_inputs(arg).tolist()
        elif kind == STORE:
            reads = [arg]
        elif kind == ARRIVE:
            reads = [arg, *problem.inputs(int(problem.producer[arg])).tolist()]
        for storage in reads:
            copy = current[storage]
            assert copy.waited is None, f"event {at} reads storage {storage} while it is on the host"
            assert kind == ARRIVE or not copy.under_way, f"event {at} reads storage {storage} before it is there"
            copy.under_way = False
            copy.uses.append(at)
        fresh: list[int] = []
        if kind == FIRST:
            fresh = problem.outputs(arg).tolist()
            assert not any(s in current for s in fresh)
        elif kind == REDO:
            assert problem.redo_ok[arg]
            fresh = events.renews(at).tolist()
            unwanted[at] = sum(int(problem.nbytes[s]) for s in problem.outputs(arg).tolist() if s not in fresh)
            assert fresh
        elif kind == WAIT:
            current[arg].waited = at
        elif kind == LOAD:
            assert current[arg].waited is not None
            fresh = [arg]
        for storage in fresh:
            under_way = kind in (FIRST, REDO) and problem.message_ns[arg] > 0
            assert storage not in current or not current[storage].under_way
            current[storage] = Copy(storage, at, under_way=under_way)
            copies.append(current[storage])
    assert not any(copy.under_way for copy in copies)
    return _weigh(problem, events, copies, unwanted)


def _weigh(problem: Problem, events: Events, copies: list[Copy], unwanted: dict[int, int]) -> Replayed:
    levels, tensors = [], []
    for at in range(len(events)):
        kind, arg = int(events.kind[at]), int(events.arg[at])
        alive = [c for c in copies if c.birth <= at <= c.death(problem, len(events))]
        level = sum(int(problem.nbytes[c.storage]) for c in alive) + unwanted.get(at, 0)
        scratch = scratch_tensor = 0
        if kind in (FIRST, REDO):
            scratch = int((problem.redo_ws if kind == REDO else problem.node_ws)[arg])
            scratch_tensor = int((problem.redo_tensor if kind == REDO else problem.node_tensor)[arg])
            dying = {c.storage for c in alive if c.death(problem, len(events)) == at and at in c.uses}
            fits = [s for s in problem.reuses(arg).tolist() if s in dying]
            assert int(events.reuse[at]) == (fits[0] if fits else -1)
            level -= int(problem.nbytes[fits[0]]) if fits else 0
        else:
            assert events.reuse[at] == -1
        if kind == BLOCK:
            scratch, scratch_tensor = int(problem.blk_ws[arg]), int(problem.blk_tensor[arg])
        worst, worst_tensor = level + scratch, level + scratch_tensor
        if kind == BLOCK:  # its second part, without the inputs that die with it
            gone = {c.storage for c in alive if c.death(problem, len(events)) == at and at in c.uses}
            rest = level - sum(int(problem.nbytes[s]) for s in gone)
            worst = max(worst, rest + int(problem.blk_late_ws[arg]))
            worst_tensor = max(worst_tensor, rest + int(problem.blk_late_tensor[arg]))
        levels.append(problem.persistent_bytes + worst)
        tensors.append(problem.persistent_bytes + worst_tensor)
    latency, stalled = _time(problem, events)
    return Replayed(max(levels), max(tensors), latency, stalled, levels)


def _run_behind(events: Events, at: int) -> int:
    """The node that runs at an event or, where that is no run, at the first one behind it."""
    return next(int(arg) for kind, arg in zip(events.kind[at:], events.arg[at:], strict=True) if kind in (FIRST, REDO))


def _time(problem: Problem, events: Events) -> tuple[int, int]:
    now = out = back = sent = stalled = 0
    arrives: dict[int, int] = {}
    stored: dict[int, int] = {}
    loaded: dict[int, int] = {}
    for at in range(len(events)):
        kind, arg = int(events.kind[at]), int(events.arg[at])
        if kind in (WAIT, LOAD, FIRST, REDO) and problem.at_once[_run_behind(events, at)]:
            now = max(now, sent)  # in whatever order it waits for copies and for messages
        wanted = now
        if kind == STORE:
            out = max(out, now) + copy_ns(problem, arg)
            stored[arg] = out
        elif kind == WAIT:
            wanted = stored[arg]
        elif kind == LOAD:
            back = max(back, now) + copy_ns(problem, arg)
            loaded[arg] = back
        elif kind == ARRIVE:
            now = wanted = max(now, arrives[arg])
        elif kind != BLOCK:
            wanted = max([now, *(loaded.get(s, 0) for s in problem.inputs(arg).tolist())])
        stalled += max(0, wanted - now)
        now = max(now, wanted)
        if kind in (FIRST, REDO) and problem.copies[arg]:
            assert max(out, back) <= now, f"event {at} makes copies of its own while others are under way"
            out = back = now + int((problem.node_ns, problem.redo_ns)[kind][arg])
        if kind in (FIRST, REDO, BLOCK):
            now += int((problem.node_ns, problem.redo_ns, problem.blk_ns)[kind][arg])
        if kind in (FIRST, REDO) and problem.at_once[arg]:
            sent = now
        if kind in (FIRST, REDO) and problem.message_ns[arg]:
            sent = max(sent, now) + int(problem.message_ns[arg])
            arrives[int(problem.outputs(arg)[0])] = sent
    return now, stalled
