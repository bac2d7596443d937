"""The time of one operator: from a profile if it has the operator, else from the roofline; loops included."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from magis.cost.devices import DeviceModel
from magis.cost.flops import OperatorWork, work
from magis.cost.links import message_ns
from magis.cost.profile_store import Curve, Profile, kin_key, target_of
from magis.cost.shapes import parse_with_outputs
from magis.cost.signature import parse, signature
from magis.errors import MagisError
from magis.graph.loop_rules import ADDMM, MERGES, PART, rows_around
from magis.graph.nodes import ARRIVED, Const, Graph, Op, Ref, Value, every_op
from magis.ops.collectives import is_message
from magis.ops.own_updates import OWN_UPDATES

# Time of one operator from its work and the device constants: a roofline with penalties for small operators.
#
#     time = launches + arithmetic (+) traffic        (+) is max where the device hides one behind the other, else
#     sum
#
# Arithmetic runs at the reachable share of the peak of the operator's kind and type, traffic at its share of the
# bandwidth. Both shares shrink with the operator (Hockney's half-performance size: n / (n + n_half)), so that
# splitting an operator costs more than its launches. A convolution whose image is not in the memory format of the
# device's kernels is charged for converting it. Integer nanoseconds, computed in double precision from integers:
# equal on every machine.

_CONVOLUTIONS = frozenset({"conv", "conv_backward"})
_MATRIX = _CONVOLUTIONS | {"matmul", "attention", "attention_backward"}


def roofline_ns(device: DeviceModel, op: Op, values: Mapping[int, Value]) -> int:
    """Estimate the ns of one call on a device; `values` has its inputs and outputs."""
    if op.target == ARRIVED:
        return 0
    if op.target in OWN_UPDATES:
        return int(dict(op.kwargs)["ns"])  # type: ignore[arg-type]
    if is_message(op.target):
        return message_ns(device.name, op, values)
    return work_ns(device, work(op, values))


def work_ns(device: DeviceModel, done: OperatorWork) -> int:
    """Estimate the ns of one call from its arithmetic and memory traffic."""
    if done.kind in ("view", "none"):  # nothing runs on the device
        return device.view_ns
    rates = device.rates_of(done)
    matrix = done.kind in _MATRIX
    peak = device.matrix_flops.get(done.dtype, device.vector_flops) if matrix else device.vector_flops
    reached = peak * rates.arithmetic
    if matrix:
        reached *= _share(done.results, device.half_outputs) * _share(done.smallest_dimension, device.half_dimension)
        reached *= _share(done.smallest_channels, device.half_channels)
    # a measured time per element replaces counted arithmetic, except that matrix products are added
    per_element = device.element_ns.get(done.name, device.element_ns.get(done.kind))
    counted = matrix or per_element is None
    arithmetic = (done.flops / reached * 1e9 if counted else 0.0) + (per_element or 0.0) * done.elements
    bandwidth = device.bandwidth * rates.bandwidth * _share(done.moved_bytes, device.half_bytes)
    traffic = done.moved_bytes / bandwidth * 1e9
    busy = max(arithmetic, traffic) if device.overlaps else arithmetic + traffic
    if done.kind in _CONVOLUTIONS and done.laid_out and done.dtype in device.lays_out:
        busy += done.moved_bytes / (device.bandwidth * device.rates["layout"].bandwidth) * 1e9
    if done.fresh_bytes >= device.fault_bytes > 0:
        busy += done.fresh_bytes * device.fault_ns_per_byte
    launches = done.tensors if device.loops_lists else done.launches
    return launches * device.launch_ns + rates.overhead_ns + round(busy)


def _share(size: int, half: int) -> float:
    """Return the fraction of a peak that an operator of this size reaches; 1 if the size is unknown."""
    return size / (size + half) if size else 1.0


MERGING = (PART, *MERGES)


def signatures_of(graph: Graph) -> Iterator[str]:
    """Yield the signature of every operator that runs on the device, those in loop bodies included."""
    for op, values in every_op(graph):
        if op.body is None and (op.target in MERGING or not op.target.startswith("magis.")):
            yield signature(*equivalent(op, values))


def equivalent(op: Op, values: Mapping[int, Value]) -> tuple[Op, Mapping[int, Value]]:
    """Return the ATen call that does the work of a `magis.part`, `join`, `reduce`, `addmm` or `addsum`.

    The values returned for these are those of the call only. Other operators and their values are unchanged.
    """
    if op.target not in MERGING:
        return op, values
    values = {value: values[value] for value in (*op.inputs(), *op.made())}
    match op.target, op.args:
        case "magis.part", (Ref(whole), *_):
            made = values[op.made()[0]]
            window = replace(values[whole], shape=made.shape)
            target = "aten.alias.default" if made.storage == window.storage else "aten.clone.default"
            return replace(op, target=target, args=(Ref(whole),)), {**values, whole: window}
        case "magis.join", (Ref(whole), Ref(part), *_):
            window = replace(values[whole], shape=values[part].shape)
            target = "aten.add_.Tensor" if any(rows_around(op)) else "aten.copy_.default"
            merged = replace(op, target=target, args=(Ref(whole), Ref(part)), outputs=(whole,))
            return merged, {**values, whole: window}
        case (("magis.addmm" | "magis.addsum"), (Ref(whole), Ref(taken), *rest)):
            dtype = values[whole].dtype
            if op.target == ADDMM and values[taken].dtype == dtype:
                return replace(op, target="aten.addmm_.default", outputs=(whole,)), values
            if op.target == ADDMM:
                return replace(
                    op, target="aten.addmm.dtype", args=(*op.args, Const("dtype", dtype)), outputs=(whole,)
                ), values
            return replace(op, target="aten.sum.dim_IntList", args=(Ref(taken), *rest), outputs=(whole,)), values
        case "magis.reduce", (Ref(whole), Ref(part), _):
            return replace(op, target="aten.add_.Tensor", args=(Ref(whole), Ref(part)), outputs=(whole,)), values
    return op, values


MEASURED, INTERPOLATED, ESTIMATED = "measured", "interpolated", "estimated"


@dataclass(frozen=True, slots=True)
class Price:
    """Nanoseconds of a call, their source, and their typical relative error (0: unknown)."""

    ns: int
    source: str
    error: float = 0.0


@dataclass(frozen=True)
class Prices:
    """Prices of operators on one device, computed on first use and cached."""

    device: DeviceModel
    profile: Profile | None = None
    _known: dict[str, Price] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Prices by signature."""
    _curves: dict[str, Curve] = field(default_factory=dict, init=False, repr=False, compare=False)
    _kinds: dict[str, dict[str, list[str]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Measured signatures by operator, then by `kin_key`."""

    def price(self, op: Op, values: Mapping[int, Value]) -> Price:
        op, values = equivalent(op, values)
        key = signature(op, values)
        if key not in self._known:
            self._known[key] = self._look_up(key, op, values)
        return self._known[key]

    def _look_up(self, key: str, op: Op, values: Mapping[int, Value]) -> Price:
        """Return the measured price, else one interpolated from calls with other sizes, else the roofline's."""
        expected = roofline_ns(self.device, op, values)
        if self.profile is None or not expected:  # 0 ns needs no measurement
            return Price(expected, MEASURED if not expected else ESTIMATED)
        entry = self.profile.entries.get(key)
        if entry is not None:
            return Price(entry.ns, MEASURED, entry.spread / entry.ns if entry.ns else 0.0)
        answer = self._curve(self.profile, op.target, kin_key(op, values)).at(expected)
        return Price(expected, ESTIMATED) if answer is None else Price(answer.ns, INTERPOLATED, answer.error)

    def _curve(self, profile: Profile, target: str, kind: str) -> Curve:
        """Return the curve of an operator's measured calls with one `kin_key`."""
        if target not in self._kinds:
            kinds = self._kinds[target] = {}
            for key in self._by_target.get(target, ()):
                with contextlib.suppress(MagisError):  # not a signature, so never looked up
                    kinds.setdefault(kin_key(*parse(key)), []).append(key)
        if kind not in self._curves:
            points = []
            for key in self._kinds[target].get(kind, ()):
                with contextlib.suppress(MagisError):  # the installed torch rejects the call
                    points.append((roofline_ns(self.device, *parse_with_outputs(key)), profile.entries[key].ns))
            self._curves[kind] = Curve.of(points)
        return self._curves[kind]

    @cached_property
    def _by_target(self) -> Mapping[str, list[str]]:
        """Signatures by operator, parsed later, since most operators are never looked up."""
        found: dict[str, list[str]] = {}
        for key in self.profile.entries if self.profile is not None else ():
            found.setdefault(target_of(key), []).append(key)
        return found
