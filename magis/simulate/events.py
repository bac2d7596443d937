"""Plans, and the complete schedules that they expand to.

A plan is an order of the nodes and one flag per temporary storage. ``expand`` (see ``evaluator``) makes a
schedule of it: a sequence of events in which nothing is left to decide. At every event there is one *current
copy* of each storage that somebody still reads; REDO and LOAD replace it, nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from magis.simulate.problem import Int8s, Int32s, Int64s

__all__ = ["BLOCK", "DROP", "FIRST", "KEEP", "LOAD", "RECOMPUTE", "REDO", "STORE", "SWAP", "WAIT", "Events"]

# What a plan says of a storage. Its gap is the longest idle stretch between two touches.
KEEP = 0  # in memory from its production to its last use, be that a recomputation
RECOMPUTE = 1  # leaves at the start of its gap; made again, with all that is missing for it, when next needed
SWAP = 2  # copied to the host at the start of its longest gap, back before its end; as KEEP otherwise
DROP = 3  # leaves after its last use by a node; made again if a recomputation needs it later

# Kinds of events; each has one argument.
FIRST = 0  # node runs as in the original step
REDO = 1  # node runs again in the form that recomputes
BLOCK = 2  # update block runs
STORE = 3  # storage starts to be copied to the host, after everything issued so far
WAIT = 4  # the compute stream waits for that copy and frees the device memory of the storage
LOAD = 5  # device memory of the storage is allocated again and filled; its next reader waits for that


@dataclass(frozen=True, eq=False)
class Events:
    """A complete schedule of m events. Readers (nodes, blocks, stores) take the current copy of a storage.

    A copy dies right after the last event that reads it, and right after its own event if none does; storages
    that live to the end of the step do not die. Nothing else frees memory, except WAIT.
    """

    kind: Int8s  # [m] FIRST ... LOAD
    arg: Int32s  # [m] node, block or storage
    reuse: Int32s  # [m] storage dying with this FIRST or REDO whose memory its output takes over, or -1
    renew_ptr: Int32s  # [m + 1] outputs of this REDO that become current; its others die at once
    renew_idx: Int32s

    def __len__(self) -> int:
        return len(self.kind)

    def repeats(self, nbytes: Int64s) -> tuple[int, int]:
        """Nodes that run again, and bytes that are swapped; ``nbytes`` of each storage."""
        swapped = self.arg[self.kind == STORE]
        return int(np.count_nonzero(self.kind == REDO)), int(nbytes[swapped].sum())

    def renews(self, event: int) -> Int32s:
        return self.renew_idx[self.renew_ptr[event] : self.renew_ptr[event + 1]]
