"""Time of one operator from what it does and what the device can do: the roofline, with small operators
charged.

    time = launches + arithmetic (+) traffic        (+) is max where the device hides one behind the other, else
    sum

Arithmetic runs at the reachable share of the peak of the operator's kind and type, traffic at its share of
the bandwidth. Both shares shrink with the operator (Hockney's half-performance size: n / (n + n_half)), so
that splitting an operator costs more than its launches. Whole nanoseconds, computed in double precision from
integers: the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from magis.cost.devices import DeviceModel
from magis.cost.flops import Work, work
from magis.ir.types import Op, Value

__all__ = ["roofline_ns"]

_MATRIX = frozenset({"matmul", "conv", "conv_backward", "attention", "attention_backward"})


def roofline_ns(device: DeviceModel, op: Op, values: Mapping[int, Value]) -> int:
    """Estimated nanoseconds of one call on `device`; `values` holds its inputs and outputs."""
    return _nanoseconds(device, work(op, values))


def _nanoseconds(device: DeviceModel, done: Work) -> int:
    if done.kind in ("view", "none"):  # nothing runs on the device
        return device.view_ns
    rates = device.rates.get(done.kind, device.rates["unknown"])
    matrix = done.kind in _MATRIX
    peak = device.matrix_flops.get(done.dtype, device.vector_flops) if matrix else device.vector_flops
    reached = peak * rates.arithmetic
    if matrix:
        reached *= _share(done.results, device.half_outputs) * _share(done.smallest_dimension, device.half_dimension)
    # a measured time per element takes the place of counted arithmetic, except where products come on top
    per_element = device.element_ns.get(done.name, device.element_ns.get(done.kind))
    counted = matrix or per_element is None
    arithmetic = (done.flops / reached * 1e9 if counted else 0.0) + (per_element or 0.0) * done.elements
    bandwidth = device.bandwidth * rates.bandwidth * _share(done.moved_bytes, device.half_bytes)
    traffic = done.moved_bytes / bandwidth * 1e9
    busy = max(arithmetic, traffic) if device.overlaps else arithmetic + traffic
    if done.fresh_bytes >= device.fault_bytes > 0:
        busy += done.fresh_bytes * device.fault_ns_per_byte
    launches = done.tensors if device.loops_lists else done.launches
    return launches * device.launch_ns + rates.overhead_ns + round(busy)


def _share(size: int, half: int) -> float:
    """Part of a peak that an operator of this size reaches; 1 where no size is known."""
    return size / (size + half) if size else 1.0
