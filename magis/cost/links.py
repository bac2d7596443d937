"""Links between the ranks of one machine, and the time of a message over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magis.graph import Op, Value
from magis.ops.collectives import name_of_collective, ranks_of
from magis.ops.exchanges import EXCHANGE


@dataclass(frozen=True)
class Links:
    """Speed of the links between the ranks of one machine."""

    bytes_per_s: float
    """Bytes a second from one rank to the next, in one direction, in long messages."""
    message_ns: int = 20_000
    """Time to begin a message."""
    hidden: float = 0.5
    """Share of the operators' time behind which messages that need not be waited for can hide: the backward."""

    def ns(self, sent_bytes: float) -> float:
        """Return the nanoseconds of a message in which a rank sends so many bytes."""
        return self.message_ns + sent_bytes / self.bytes_per_s * 1e9


LINKS: Mapping[str, Links] = {
    "cpu": Links(2e9, 100_000),
    "rtx3090": Links(12e9),
    "v100": Links(77e9),
    "a100": Links(230e9),
    "h100": Links(350e9),
    "h200": Links(350e9),
}
"""By device. rtx3090: PCIe; the others: NVLink at what collectives reach of it, some 77% (of a V100 among four: four
links of 25 GB/s each)."""


def links_of(device: str) -> Links:
    """Return the links of a device by its name; of an unknown one, a CPU's."""
    return LINKS.get(device.removeprefix("sim:"), LINKS["cpu"])


def message_ns(device: str, op: Op, values: Mapping[int, Value]) -> int:
    """Return the nanoseconds of a message of a step.

    By rings, in which a rank sends (n - 1) / n of the whole tensor, twice for a sum that all get; between two ranks
    the larger of the tensors that either sends, without waiting for the other.
    """
    ranks = ranks_of(op)
    sizes = [values[value].nbytes for value in (*op.inputs(), *op.made())]
    if op.target == EXCHANGE:
        return round(links_of(device).ns(max(sizes)))
    once = (ranks - 1) / ranks * max(sizes, default=0)
    return round(links_of(device).ns(2 * once if name_of_collective(op) == "all_reduce" else once))
