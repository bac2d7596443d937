"""The cost model that searches and simulations are given: nanoseconds and workspace bytes of an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from magis.cost.devices import DeviceModel, find_device
from magis.cost.loops import MERGING
from magis.cost.prices import Price, Prices
from magis.cost.scratch import estimated_workspace
from magis.cost.signature import signature
from magis.cost.store import Profile
from magis.ir.types import Op, Value

__all__ = ["CostModel", "RooflineCosts", "device_model"]


class CostModel(Protocol):
    """What simulators and searches ask. Every answer is a whole number and depends on the arguments alone."""

    @property
    def name(self) -> str:
        """The device: "cpu", "cuda" or "sim:<name>"."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory of the device."""
        ...

    @property
    def rounding(self) -> int:
        """The allocator hands out multiples of this many bytes."""
        ...

    @property
    def link_bytes_per_s(self) -> float:
        """Host link in one direction, bytes a second; 0: nothing is swapped on this device."""
        ...

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        """Time of one call on the device."""
        ...

    def workspace(self, op: Op, values: Mapping[int, Value]) -> int:
        """Bytes that the call allocates at its worst moment beyond its fresh outputs."""
        ...

    def transfer_ns(self, nbytes: int) -> int:
        """Time to copy `nbytes` between device and host. Raises ValueError on a device without a link."""
        ...

    def price(self, op: Op, values: Mapping[int, Value]) -> Price:
        """The time of one call that is no loop, and where it is from."""
        ...


@dataclass(frozen=True)
class RooflineCosts:
    """Costs from a profile where it knows the signature or kin of it, else from the roofline of `device`.

    `workspaces` (bytes by signature, measured in isolation on the device) come before the profile's, those
    before the documented estimates of `magis.cost.scratch`.
    """

    device: DeviceModel
    profile: Profile | None = None
    workspaces: Mapping[str, int] = field(default_factory=dict)
    prices: Prices | None = field(default=None, repr=False, compare=False)
    """Of this device and profile, where they are shared with other costs."""

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def memory_bytes(self) -> int:
        return self.device.memory_bytes

    @property
    def rounding(self) -> int:
        return self.device.rounding

    @property
    def link_bytes_per_s(self) -> float:
        measured = 0 if self.profile is None else self.profile.link
        return float(measured or self.device.link_bytes_per_s)

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        if op.body is not None:
            inside = op.body.graph
            return op.body.parts * sum(self.nanoseconds(each, inside.values) for each in inside.ops)
        return self.price(op, values).ns

    def price(self, op: Op, values: Mapping[int, Value]) -> Price:
        return (self.prices or self._own).price(op, values)

    @cached_property
    def _own(self) -> Prices:
        return Prices(self.device, self.profile)

    def workspace(self, op: Op, values: Mapping[int, Value]) -> int:
        if op.target in MERGING:
            return 0  # copies and sums in place
        key = signature(op, values)
        if key in self.workspaces:
            return self.workspaces[key]
        if self.profile is not None and key in self.profile.entries:
            return self.profile.entries[key].workspace
        return estimated_workspace(op, values, gpu=self.device.name != "cpu")

    def transfer_ns(self, nbytes: int) -> int:
        if self.link_bytes_per_s <= 0:
            raise ValueError(f"{self.name} has no host link to swap over")
        return self.device.launch_ns + round(nbytes / self.link_bytes_per_s * 1e9)


def device_model(
    name: str,
    *,
    gpu: str = "",
    profile: Profile | None = None,
    workspaces: Mapping[str, int] | None = None,
) -> RooflineCosts:
    """Costs of "cpu", "sim:<name>", or "cuda" with a GPU that calls itself `gpu`.

    Raises UnknownDevice, whose message lists the names.
    """
    return RooflineCosts(find_device(name, gpu), profile, workspaces if workspaces is not None else {})
