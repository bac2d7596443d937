"""The costs for searches and simulations: nanoseconds, workspace bytes, and the sources of the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from magis.cost.devices import DeviceModel, find_device
from magis.cost.machines import worst_factors
from magis.cost.operator_latency import ESTIMATED, INTERPOLATED, MEASURED, MERGING, Price, Prices
from magis.cost.profile_store import Profile
from magis.cost.signature import signature
from magis.graph.loop_rules import ADDSUM
from magis.graph.nodes import ITEM_SIZE, Graph, Op, Value
from magis.ops.generators import STATE_BYTES
from magis.ops.operators import name_of, op_info
from magis.ops.own_updates import OWN_UPDATES

# Estimated workspace of operators where it cannot be measured, in bytes in addition to the outputs.
#
# GPU (assumptions, not measurements):
#
# * Matrix products take none of their own: cuBLAS's workspace (8 MiB; 32 MiB on Hopper) is allocated once per
#   process, for the original and the planned step alike.
# * Convolutions run as implicit products without scratch, but for half-precision weight gradients, which are
#   summed in float32 first.
# * Attention's backward pass keeps one float32 number per row, and sums half-precision query gradients in
#   float32. Gradients of grouped heads are made for each head of the query, then summed.
# * LayerNorm's backward pass keeps partial weight gradients, one float32 row per 64 rows of the input and
#   weight.
# * Embedding's backward pass sorts its indices: four copies of them.
# * All other operators take none.
#
# CPU (as oneDNN and ATen behaved under torch 2.13; measured workspaces replace these wherever a step really runs):
#
# * Convolutions copy their weight and one activation tensor into blocked layouts; the backward pass both of
#   them.
# * Dropout draws its mask in float32; LayerNorm's backward pass keeps two float32 rows per thread (two
#   threads).
# * Attention keeps a block of scores per thread.

_THREADS = 2
_HALF = ("float16", "bfloat16")


def estimated_workspace(op: Op, values: Mapping[int, Value], *, gpu: bool) -> int:
    """Estimate the workspace of one call in bytes; 0 for operators without an estimate (see the comment above)."""
    if op.target in ("magis.rng_save", "magis.rng_enter"):  # torch returns the state as a CPU tensor
        return 0 if gpu else STATE_BYTES["cpu"]
    inputs = [values[number] for number in op.inputs()]
    if not inputs:
        return 0
    kind, name = op_info(op.target).kind, name_of(op.target)
    outputs = [values[number] for number in op.made()]
    return _on_gpu(op, name, kind, inputs) if gpu else _on_cpu(op, name, kind, inputs, outputs)


def _on_gpu(op: Op, name: str, kind: str, inputs: list[Value]) -> int:
    half = inputs[0].dtype in _HALF
    match kind:
        case "conv_backward":
            mask = op.args[-1]
            wanted = isinstance(mask, tuple) and len(mask) == 3 and mask[1] is True
            return 4 * inputs[2].numel if half and wanted else 0
        case "attention_backward" if not name.startswith("flex"):  # whose results have it
            query, key, value = inputs[1:4]
            groups = query.shape[1] // max(1, key.shape[1]) if len(query.shape) == 4 and "cudnn" not in name else 1
            expanded = groups * (key.nbytes + value.nbytes) if groups > 1 else 0
            return 4 * prod(query.shape[:-1]) + (4 * query.numel if half else 0) + expanded
        case "norm" if name.endswith("_backward"):
            features = _features(op, inputs[1])
            rows = inputs[1].numel // max(1, features)
            return 2 * 4 * features * -(-rows // 64)
        case "scatter" if name == "embedding_dense_backward":
            return 4 * inputs[1].nbytes
        case _:
            return 0


def _on_cpu(op: Op, name: str, kind: str, inputs: list[Value], outputs: list[Value]) -> int:
    match kind:
        case "conv":
            return inputs[1].nbytes + (outputs[0].nbytes if outputs else inputs[0].nbytes)
        case "conv_backward":
            return inputs[0].nbytes + inputs[1].nbytes + inputs[2].nbytes
        case "random" if name == "native_dropout":
            return 4 * inputs[0].numel
        case "norm" if name.endswith("_backward"):
            return 2 * 4 * _THREADS * _features(op, inputs[1])
        case "attention" | "attention_backward":
            query = inputs[1 if kind == "attention_backward" else 0]
            return 4 * _THREADS * min(query.shape[-2], 64) * (512 + query.shape[-1])
        case _:
            return 0


def _features(op: Op, image: Value) -> int:
    """Return the number of elements of one normalized row: LayerNorm's normalized shape, else the channels."""
    for arg in op.args:
        if isinstance(arg, tuple) and arg and all(isinstance(item, int) for item in arg):
            return prod(item for item in arg if isinstance(item, int))
    return image.shape[1] if len(image.shape) > 1 else 1


@dataclass(frozen=True)
class RooflineCosts:
    """Costs from a profile where it has the signature or calls with other sizes, else from the roofline of `device`.

    All costs are integers and deterministic. A workspace is looked up in `workspaces` (bytes by signature, measured on
    the device), then in the profile, then estimated.
    """

    device: DeviceModel
    profile: Profile | None = None
    workspaces: Mapping[str, int] = field(default_factory=dict)
    prices: Prices | None = field(default=None, repr=False, compare=False)
    """Shared cache of prices for this device and profile; None: a private one."""
    slack: float = 0.0
    """Slack of host copies: the worst machine of this slack gives their time (`magis.cost.machines`)."""
    hurry: float = 1.0
    """Factor of the host link's speed for a search whose plans may wait for copies: plans that never wait there."""

    @property
    def name(self) -> str:
        """Name of the device: "cpu", "cuda" or "sim:<name>"."""
        return self.device.name

    @property
    def memory_bytes(self) -> int:
        return self.device.memory_bytes

    @property
    def rounding(self) -> int:
        """Block size in bytes to which the allocator rounds allocations up."""
        return self.device.rounding

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth of the host link in one direction, in bytes per second; 0: no swaps on this device."""
        measured = 0 if self.profile is None else self.profile.link
        link, kernels = worst_factors(self.slack)
        return float(measured or self.device.link_bytes_per_s) * link * kernels * self.hurry

    @property
    def copy_ns(self) -> int:
        """Fixed time of a host copy in ns."""
        measured = 0 if self.profile is None else self.profile.copy_ns
        _, kernels = worst_factors(self.slack)
        return round((measured or self.device.copy_ns) / kernels / self.hurry)

    @property
    def nominal(self) -> RooflineCosts:
        """Costs without slack or hurry."""
        return replace(self, slack=0.0, hurry=1.0)

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        if op.body is not None:
            inside = op.body.graph
            return op.body.parts * sum(self.nanoseconds(each, inside.values) for each in inside.ops)
        return self.price(op, values).ns

    def price(self, op: Op, values: Mapping[int, Value]) -> Price:
        """Return the time of one call (not a loop), with its source."""
        return (self.prices or self._own_prices).price(op, values)

    @cached_property
    def _own_prices(self) -> Prices:
        return Prices(self.device, self.profile)

    def workspace(self, op: Op, values: Mapping[int, Value]) -> int:
        """Return the peak bytes that a call allocates in addition to its outputs."""
        if op.target in MERGING:
            whole, *taken = (values[value] for value in op.inputs())
            # torch's CPU kernels do not sum half precision in float32: they, or we, convert it first
            converted = [each for each in taken if self.device.name == "cpu" and each.dtype != whole.dtype]
            size = sum(each.numel for each in converted) + (whole.numel if op.target == ADDSUM else 0)
            return ITEM_SIZE[whole.dtype] * size
        if op.target in OWN_UPDATES:
            return int(dict(op.kwargs)["scratch"])  # type: ignore[arg-type]
        key = signature(op, values)
        if key in self.workspaces:
            return self.workspaces[key]
        if self.profile is not None and key in self.profile.entries:
            return self.profile.entries[key].workspace
        return estimated_workspace(op, values, gpu=self.device.name != "cpu")

    def transfer_ns(self, nbytes: int) -> int:
        """Return the time of a host copy in ns. Raises ValueError on a device without a host link."""
        if self.link_bytes_per_s <= 0:
            raise ValueError(f"{self.name} has no host link to swap over")
        return self.copy_ns + round(nbytes / self.link_bytes_per_s * 1e9)


def device_model(
    name: str,
    *,
    gpu: str = "",
    profile: Profile | None = None,
    workspaces: Mapping[str, int] | None = None,
) -> RooflineCosts:
    """Return the costs of "cpu", of "sim:<name>", or of "cuda" with torch's name of the GPU in `gpu`.

    Raises UnknownDevice, whose message lists the names.
    """
    return RooflineCosts(find_device(name, gpu), profile, workspaces if workspaces is not None else {})


# Sources of a step's latency: the fractions measured, interpolated, or estimated by a roofline.


@dataclass(frozen=True, slots=True)
class Shares:
    """Fractions of a step's time by source; they add up to 1."""

    measured: float = 0.0
    interpolated: float = 0.0
    estimated: float = 1.0
    error: float = 0.0
    """Typical relative error of the interpolated part."""


def shares(costs: RooflineCosts, graph: Graph) -> Shares:
    """Return the fractions of a graph's time by source, loops counted for every part, without host time."""
    spent: Counter[str] = Counter()
    off = 0.0
    for times, price in _prices(costs, graph, 1):
        spent[price.source] += times * price.ns
        off += times * price.ns * price.error if price.source == INTERPOLATED else 0.0
    total, interpolated = spent.total(), spent[INTERPOLATED]
    if not total:
        return Shares()
    return Shares(
        measured=spent[MEASURED] / total,
        interpolated=interpolated / total,
        estimated=spent[ESTIMATED] / total,
        error=off / interpolated if interpolated else 0.0,
    )


def _prices(costs: RooflineCosts, graph: Graph, times: int) -> Iterator[tuple[int, Price]]:
    for op in graph.ops:
        if op.body is not None:
            yield from _prices(costs, op.body.graph, times * op.body.parts)
        elif op.target in MERGING or not op.target.startswith("magis."):
            yield times, costs.price(op, graph.values)
