"""Whether a limit is below what any schedule needs: all states of memory that can be reached under it, one by one.

A pebble game (Hopcroft, Paul and Valiant, 1977) on the arrays of a step: an operator runs where its inputs are in
memory and its outputs find room beside them; any tensor may be dropped, and any operator may run again, as often as one
likes, in any order. What makes the step harder is left out: tensors no larger than the largest that must be there in
the end (gradients that updates read, the loss) take no memory and are never dropped, updates keep no operator from
running again. So a step that cannot be finished here has no plan; one that can need not have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from magis.simulate.problem import Problem

__all__ = ["has_no_schedule"]


@dataclass(frozen=True)
class _Move:
    """An operator; storages are bits, of the large ones in `inputs`, `outputs` and `reuses`."""

    inputs: int
    outputs: int
    small_inputs: int
    small_outputs: int
    nbytes: int
    """Of its large outputs and its workspace."""
    reuses: tuple[int, ...]


def has_no_schedule(problem: Problem, limit: int, most: int = 300_000) -> bool:
    """Return True if no order with any recomputations stays within `limit` bytes; False if that is not shown within
    `most` states."""
    ends = {int(each) for each in problem.block_inputs.idx} | {at for at, kept in enumerate(problem.to_end) if kept}
    small = max((int(problem.nbytes[each]) for each in ends), default=0)
    large = [at for at in range(problem.n_storages) if problem.nbytes[at] > small]
    moves = list(_moves(problem, {at: 1 << place for place, at in enumerate(large)}))
    sizes = [int(problem.nbytes[at]) for at in large]
    wanted = sum(1 << at for at in ends)
    room = limit - problem.persistent_bytes

    start = 0, _with_small(moves, 0, 0, sizes, room)
    seen, left = {start}, [start]
    while left and len(seen) <= most:
        held, made = left.pop()
        if not wanted & ~made:
            return False
        for move in moves:
            ready = not (move.inputs & ~held or move.small_inputs & ~made)
            if not ready or not (move.outputs & ~held or (not move.outputs and move.small_outputs & ~made)):
                continue
            for after in _after(move, held, sizes, room):
                state = after, _with_small(moves, after, made | move.small_outputs, sizes, room)
                if state not in seen:
                    seen.add(state)
                    left.append(state)
    return not left


def _moves(problem: Problem, bits: dict[int, int]) -> Iterator[_Move]:
    for node in range(problem.n_nodes):
        inputs, outputs = problem.inputs(node).tolist(), problem.outputs(node).tolist()
        workspace = min(int(problem.node_ws[node]), int(problem.redo_ws[node]))
        yield _Move(
            sum(bits.get(at, 0) for at in inputs),
            sum(bits.get(at, 0) for at in outputs),
            sum(1 << at for at in inputs if at not in bits),
            sum(1 << at for at in outputs if at not in bits),
            sum(int(problem.nbytes[at]) for at in outputs if at in bits) + workspace,
            tuple(bits[at] for at in problem.reuses(node).tolist() if at in bits),
        )


def _after(move: _Move, held: int, sizes: list[int], room: int) -> Iterator[int]:
    """Yield the large storages in memory after an operator: for each input that its output may overwrite, and each
    smallest choice of others to drop."""
    beside = held & ~move.outputs
    for overwritten in (0, *move.reuses):
        excess = _bytes(beside, sizes) + move.nbytes - _bytes(overwritten, sizes) - room
        for dropped in _smallest(beside & ~move.inputs, excess, sizes):
            yield (beside & ~dropped & ~overwritten) | move.outputs


def _smallest(among: int, excess: int, sizes: list[int]) -> Iterator[int]:
    """Yield the sets of storages that free as many bytes, and none of which is larger than another."""
    bits = [1 << place for place in range(among.bit_length()) if among >> place & 1]
    found: list[int] = []
    left = [(0, 0, excess)]
    while left:
        place, chosen, missing = left.pop()
        if missing <= 0:
            found.append(chosen)
        elif place < len(bits):
            left.append((place + 1, chosen, missing))
            left.append((place + 1, chosen | bits[place], missing - _bytes(bits[place], sizes)))
    for each in found:
        if not any(other != each and other & each == other for other in found):
            yield each


def _with_small(moves: list[_Move], held: int, made: int, sizes: list[int], room: int) -> int:
    """Return the small storages with those that operators can make now, which costs nothing."""
    used, before = _bytes(held, sizes), -1
    while made != before:
        before = made
        for move in moves:
            if not (move.outputs or move.inputs & ~held or move.small_inputs & ~made) and used + move.nbytes <= room:
                made |= move.small_outputs
    return made


def _bytes(held: int, sizes: list[int]) -> int:
    return sum(size for place, size in enumerate(sizes) if held >> place & 1)
