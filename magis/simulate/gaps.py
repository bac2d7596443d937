"""The gaps of an order: a compiled pass that no other one calls (see ``kernel``)."""

from __future__ import annotations

import numba
import numpy as np

from magis.simulate.arrays import Gaps, NodeStep
from magis.simulate.problem import Int32s


@numba.njit(cache=True)
def find_gaps(step: NodeStep, order: Int32s) -> Gaps:
    """Return the gaps of an order: for each storage, the longest interval of time between two touches by nodes.

    Touches are production, mutation and reads; intervals before the last write do not count. Of equally long intervals
    the one over most positions wins, then the first.
    """
    count = len(step.nbytes)
    longest, end_ns = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    widest, last = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    start, end = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    for storage in range(count):
        longest[storage] = start[storage] = end[storage] = last[storage] = -1
        widest[storage] = end_ns[storage] = 0
    in_ptr, in_idx = step.inputs
    out_ptr, out_idx = step.outputs
    now = 0
    for position in range(len(order)):
        node = order[position]
        after = now + step.ns[0, node]
        for k in range(in_ptr[node], in_ptr[node + 1]):
            storage = in_idx[k]
            idle = now - end_ns[storage]
            wide = position - last[storage] - 1
            longer = idle > longest[storage] or (idle == longest[storage] and wide > widest[storage])
            if wide > 0 and longer:
                longest[storage] = idle
                widest[storage] = wide
                start[storage] = last[storage]
                end[storage] = position
            last[storage] = position
            end_ns[storage] = after
            if step.last_write[storage] == node:  # intervals before the last write do not count
                longest[storage] = -1
                start[storage] = -1
                end[storage] = -1
        now = after
        for k in range(out_ptr[node], out_ptr[node + 1]):
            last[out_idx[k]] = position
            end_ns[out_idx[k]] = after
    return Gaps(start, end, last)
