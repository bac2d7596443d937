"""Selection of the operator profile that prices a device, and reasons why a profile does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from magis.cost.devices import DeviceModel, gpu_name
from magis.cost.operator_latency import Prices
from magis.cost.profile_store import Profile, ProfileError, load, without_changed_operators
from magis.dtypes import autocast_type, tensor_type
from magis.runtime.measure import device_identity
from magis.runtime.profiler import schema_of

PRODUCTS = "products"
"""Key in a profile's identity: the rounding of float32 matrix products, if it is not full float32."""
FOLDER = "profiles"
"""Folder of profiles, next to the baselines of the devices."""
SAME_CPU = ("instruction set", "threads")
NAMED = 3
"""Most changed operators that a message names."""


@dataclass(frozen=True)
class Pricing:
    """Prices of a device, by an operator profile or, if `profile` is None, by the roofline."""

    profile: Profile | None = None
    source: str = ""
    """File name and origin of the profile: "h200.json (NVIDIA H200, torch 2.11.0)"; empty without a profile."""
    note: str = ""
    """Caveat about the profile, in one line; empty if there is none."""
    _prices: dict[str, Prices] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """Digest of the profile; empty without one."""
        return "" if self.profile is None else self.profile.digest

    def prices(self, device: DeviceModel) -> Prices:
        """Return the prices of a device by this profile, cached by the device's name."""
        if device.name not in self._prices:
            self._prices[device.name] = Prices(device, self.profile)
        return self._prices[device.name]


UNPRICED = Pricing()


@dataclass(frozen=True)
class Profiles:
    """Locations of profiles: one `file`, or a `folder` with one file per device."""

    file: Path | None = None
    folder: Path | None = None

    def pricing(self, device: str, dtype: str = "") -> Pricing:
        """Return the prices of a device, for steps of one dtype (empty: any).

        Raises ProfileError, in one line, if the profile `file` does not fit, or if the file in the folder is corrupt; a
        valid file in the folder that does not fit is skipped with a note.
        """
        path = self.file
        if path is None:
            path = None if self.folder is None else profile_file(self.folder, device, dtype)
            if path is None or not path.is_file():
                return UNPRICED
        profile = load(path)
        problem = refused(profile, device) or _wrong_types(profile, dtype)
        if problem:
            text = f"the operator profile {path} {problem}"
            if self.file is not None:
                raise ProfileError(text, hint="record one with magis profile, or leave it out")
            return Pricing(note=f"{text}: latencies are estimated")
        kept, changed = without_changed_operators(profile, schema_of)
        theirs = profile.device
        recorded_on = theirs.get("gpu") or f"{theirs.get('instruction set')}, {theirs.get('threads')} threads"
        source = f"{path.name} ({recorded_on}, torch {theirs.get('torch')})"
        note = ""
        if changed:  # operators with another schema than in the profile: priced without the profile
            names = ", ".join(changed[:NAMED]) + (", ..." if len(changed) > NAMED else "")
            note = f"{len(changed)} operators differ from those of torch {theirs.get('torch')}: {names}"
        return Pricing(kept, source, note)


def profile_file(folder: Path, device: str, dtype: str = "") -> Path:
    """Return the path of a device's profile: "cpu.json", "h200.json" (for "sim:h200" and for the GPU itself). Matrix
    products in tf32 run other kernels on float32 tensors, so they have a separate file, "h200-tf32.json"."""
    name = device.removeprefix("sim:")
    if device == "cuda":
        gpu = device_identity(device)["gpu"]
        name = gpu_name(gpu) or re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return folder / f"{name}{'-tf32' if dtype == 'tf32' else ''}.json"


def recording_identity(device: str, dtype: str = "") -> dict[str, str]:
    """Return the device identity for a profile recorded on this machine."""
    return {**device_identity(device), **({PRODUCTS: "tf32"} if dtype == "tf32" else {})}


def refused(profile: Profile, device: str) -> str:
    """Return the reason why a profile does not fit a device; empty if it fits."""
    theirs = profile.device
    if device.startswith("sim:"):
        if gpu_name(theirs.get("gpu", "")) == device.removeprefix("sim:"):
            return ""
        return f"is of {_describe_device(theirs)}, not of the GPU that {device} stands for"
    ours = device_identity(device)
    wanted = ("device", "gpu") if device == "cuda" else ("device", *SAME_CPU)
    if all(theirs.get(key) == ours.get(key) for key in wanted):
        return ""
    return f"is of {_describe_device(theirs)}, this is {_describe_device(ours)}"


def _wrong_types(profile: Profile, dtype: str) -> str:
    """Return the reason why a profile does not fit a dtype (operators or matrix products missing); empty if it fits."""
    if not dtype:
        return ""
    missing = {tensor_type(dtype), autocast_type(dtype) or tensor_type(dtype)} - profile.dtypes
    if missing:
        known = ", ".join(sorted(profile.dtypes)) or "none at all"
        return f"has no {' or '.join(sorted(missing))} operators (its data types: {known})"
    theirs, ours = profile.device.get(PRODUCTS, "float32"), "tf32" if dtype == "tf32" else "float32"
    return "" if theirs == ours else f"is of products in {theirs}, the case's are in {ours}"


def _describe_device(identity: Mapping[str, str]) -> str:
    if identity.get("device") == "cpu":
        return f"a CPU with {identity.get('instruction set')} and {identity.get('threads')} threads"
    return identity.get("gpu") or identity.get("device") or "another device"
