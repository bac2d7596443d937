"""An operator of our own for branches on data: what Python read off a tensor as true or false, read and compared again.

    magis.expect(%x, True)            the one element of %x is true, as it was when the step was captured
    magis.expect(%x, False, %y)       the contents of %x and %y differ

In a graph such operators write a storage of their own, of no bytes, whose last version the backward reads: gradients,
and with them the weight update, come after all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from magis.errors import MagisError
from magis.graph.nodes import Graph

EXPECT = "magis.expect.default"


class ExpectationError(MagisError):
    """A branch on data went another way than in the captured step."""


def _expect(value: Tensor, expected: bool, other: Tensor | None = None) -> None:
    found = bool(value) if other is None else torch.equal(value, other)
    if found != expected:
        raise ExpectationError(
            f"a tensor that the step branches on is {found} for this batch, {expected} when it was captured",
            hint="use torch.where in place of the branch",
        )


def _nothing(value: Tensor, expected: bool, other: Tensor | None = None) -> None:
    """Memory without contents is expected to hold nothing."""


_LIBRARY = torch.library.Library("magis", "FRAGMENT")
_LIBRARY.define("expect(Tensor value, bool expected, Tensor? other=None) -> ()")
_LIBRARY.impl("expect", _expect, "CPU")
_LIBRARY.impl("expect", _expect, "CUDA")
_LIBRARY.impl("expect", _nothing, "Meta")


def undone(graph: Graph) -> Mapping[str, int] | None:
    """What a step has written when its last expectation is read: names of inputs, and the bytes of their memory.

    None where nothing is expected.
    """
    last = max((position for position, op in enumerate(graph.ops) if op.target == EXPECT), default=None)
    if last is None:
        return None
    written = {storage for op in graph.ops[:last] for storage, _ in op.writes}
    named = {graph.values[value].storage: graph.values[value].name for value in graph.inputs}
    return {named[storage]: graph.storages[storage].nbytes for storage in sorted(written) if storage in named}
