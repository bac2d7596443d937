"""The time of one operator: from a profile where it knows the signature or kin of it, else from the roofline."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from magis.cost.devices import DeviceModel
from magis.cost.interpolate import Curve, kin
from magis.cost.loops import equivalent
from magis.cost.roofline import roofline_ns
from magis.cost.shapes import made
from magis.cost.signature import parse, signature
from magis.cost.store import Profile, target_of
from magis.errors import MagisError
from magis.ir.types import Op, Value

__all__ = ["ESTIMATED", "INTERPOLATED", "MEASURED", "Price", "Prices"]

MEASURED, INTERPOLATED, ESTIMATED = "measured", "interpolated", "estimated"


@dataclass(frozen=True, slots=True)
class Price:
    """Nanoseconds of a call, where they are from, and by which share they are typically off (0: not known)."""

    ns: int
    source: str
    error: float = 0.0


@dataclass(frozen=True)
class Prices:
    """Prices on a device, worked out when first asked for and kept."""

    device: DeviceModel
    profile: Profile | None = None
    _known: dict[str, Price] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By signature: equal layers ask once."""
    _curves: dict[str, Curve] = field(default_factory=dict, init=False, repr=False, compare=False)
    _kinds: dict[str, Mapping[str, list[str]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def price(self, op: Op, values: Mapping[int, Value]) -> Price:
        op, values = equivalent(op, values)
        key = signature(op, values)
        if key not in self._known:
            self._known[key] = self._priced(key, op, values)
        return self._known[key]

    def _priced(self, key: str, op: Op, values: Mapping[int, Value]) -> Price:
        expected = roofline_ns(self.device, op, values)
        if self.profile is None or not expected:  # what takes no time needs no measurement
            return Price(expected, MEASURED if not expected else ESTIMATED)
        entry = self.profile.entries.get(key)
        if entry is not None:
            return Price(entry.ns, MEASURED, entry.spread / entry.ns if entry.ns else 0.0)
        answer = self._curve(op.target, kin(op, values)).at(expected)
        return Price(expected, ESTIMATED) if answer is None else Price(answer.ns, INTERPOLATED, answer.error)

    def _curve(self, target: str, kind: str) -> Curve:
        if target not in self._kinds:
            self._kinds[target] = self._kinds_of(target)
        if kind not in self._curves:
            keys = self._kinds[target].get(kind, ())
            self._curves[kind] = Curve.of([point for key in keys if (point := self._point(key)) is not None])
        return self._curves[kind]

    def _point(self, key: str) -> tuple[int, int] | None:
        """Roofline and measured nanoseconds of an entry; None of a call that this torch refuses."""
        if self.profile is None:
            return None
        try:
            return roofline_ns(self.device, *made(key)), self.profile.entries[key].ns
        except MagisError:
            return None

    def _kinds_of(self, target: str) -> Mapping[str, list[str]]:
        """An operator's signatures in the profile, by what they have in common."""
        found: dict[str, list[str]] = {}
        for key in self._by_target.get(target, ()):
            with contextlib.suppress(MagisError):  # no signature: nobody asks for it
                found.setdefault(kin(*parse(key)), []).append(key)
        return found

    @cached_property
    def _by_target(self) -> Mapping[str, list[str]]:
        """All signatures by operator: reading them is put off until one of its kin is asked for."""
        found: dict[str, list[str]] = {}
        for key in self.profile.entries if self.profile is not None else ():
            found.setdefault(target_of(key), []).append(key)
        return found
