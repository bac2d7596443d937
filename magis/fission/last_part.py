"""The last part of a loop whose parts do not divide the cut dimensions: the body's operators at a smaller size.

1 x 8191 tokens in 32 parts:    31 parts of 256 tokens, the last one of 255
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from magis.cost.shapes import bytes_of, results
from magis.fission.global_calls import Literals, with_literals
from magis.fission.wide_calls import is_conversion, joined
from magis.graph import Graph, Op, Storage, Value
from magis.graph.hazards import packed
from magis.graph.loop_rules import PART


def resized(body: Graph, share: Fraction, cut: Mapping[int, Literals]) -> Graph:
    """Return a loop's body with each cut dimension ``share`` times as long, without operators that no result needs.

    ``cut``: the size literals of all others, by id. Raises VerifyError where an operator rejects that size.
    """
    found = _Resized(dict(body.storages), dict(body.values))
    calls = joined(body)
    for op in body.ops:
        call = calls.get(op.id, op).id
        if call in cut:
            cut = {**cut, op.id: () if op.id in calls and is_conversion(op) else cut[call]}
    ops, there = list[Op](), set(body.inputs)
    for op in body.ops:
        writes = op.writes and there.issuperset(op.inputs())  # not over a result that no other needs
        if op.id in cut or op.target.startswith("magis.") or writes:
            ops.append(found.operator(op, share, cut.get(op.id, ())))
            there.update(op.made())
    return replace(body, storages=found.storages, values=found.values, ops=tuple(ops))


@dataclass
class _Resized:
    """A body under construction: operators that have been seen have their new sizes."""

    storages: dict[int, Storage]
    values: dict[int, Value]

    def operator(self, op: Op, share: Fraction, cut: Literals) -> Op:
        """Return an operator with its new literals, after giving its results their new sizes."""
        smaller = tuple((path, int(size * share)) for path, size in cut)
        op = with_literals(op, smaller, op.inputs(), op.outputs)
        if op.target == PART:
            self._slice(op, share)
        elif op.target in ("magis.store", "magis.load"):
            (taken,), (made,) = op.inputs(), op.made()
            self._put(made, self.values[taken], self.storages[self.values[taken].storage].nbytes)
        elif not op.target.startswith("magis."):
            for looks, nbytes in results(op, self.values):
                self._put(looks.id, looks, nbytes)
        return op

    def _slice(self, op: Op, share: Fraction) -> None:
        (whole,), (made,), dim = op.inputs(), op.made(), op.args[1]
        looks = self.values[made]
        shape = tuple(int(size * share) if at == dim else size for at, size in enumerate(looks.shape))
        looks = replace(looks, shape=shape)
        if looks.storage == self.values[whole].storage:
            self._put(made, looks, None)
        else:
            self._put(made, replace(looks, stride=packed(shape, looks.stride)), bytes_of(shape, looks.dtype))

    def _put(self, value: int, looks: Value, nbytes: int | None) -> None:
        """Give a value its sizes, and its storage, if it is a new one, so many bytes."""
        own = self.values[value]
        self.values[value] = replace(own, shape=looks.shape, stride=looks.stride, offset=looks.offset)
        if nbytes is not None:
            self.storages[own.storage] = replace(self.storages[own.storage], nbytes=nbytes)
