"""Links between the ranks of one machine, and the time of a collective over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magis.graph import Op, Value
from magis.ops.collectives import name_of_collective, ranks_of
from magis.ops.exchanges import EXCHANGE


@dataclass(frozen=True)
class Links:
    """Bandwidth and latency of the links between the ranks of one machine."""

    bytes_per_s: float
    """Bytes per second from one rank to the next, in one direction, for large collectives."""
    message_ns: int = 20_000
    """Launch time of a collective in ns."""
    hidden: float = 0.5
    """Fraction of the operators' time that asynchronous collectives can overlap: the backward pass."""

    def ns(self, sent_bytes: float) -> float:
        """Return the time in ns of a collective in which a rank sends `sent_bytes`."""
        return self.message_ns + sent_bytes / self.bytes_per_s * 1e9


LINKS: Mapping[str, Links] = {
    "cpu": Links(2e9, 100_000),
    "rtx3090": Links(12e9),
    "v100": Links(77e9),
    "a100": Links(230e9),
    "h100": Links(350e9),
    "h200": Links(350e9),
}
"""Links by device. rtx3090: PCIe; the others: NVLink at the share that collectives reach, about 77% (a V100 among four
has four links of 25 GB/s each)."""


def links_of(device: str) -> Links:
    """Return the links of a device by name; for an unknown device, those of a CPU."""
    return LINKS.get(device.removeprefix("sim:"), LINKS["cpu"])


def message_ns(device: str, op: Op, values: Mapping[int, Value]) -> int:
    """Return the time in ns of a collective or send/recv.

    Collectives use rings, in which a rank sends (n - 1) / n of the whole tensor, twice for an all-reduce. A send/recv
    between two ranks takes as long as the larger tensor, in both directions at once.
    """
    ranks = ranks_of(op)
    sizes = [values[value].nbytes for value in (*op.inputs(), *op.made())]
    if op.target == EXCHANGE:
        return round(links_of(device).ns(max(sizes)))
    once = (ranks - 1) / ranks * max(sizes, default=0)
    return round(links_of(device).ns(2 * once if name_of_collective(op) == "all_reduce" else once))
