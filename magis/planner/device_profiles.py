"""Which operator profile prices a device, and why another one does not."""

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
"""In a profile's identity: how products of float32 were rounded, where that is not in full."""
FOLDER = "profiles"
"""Beside the baselines of the devices."""
SAME_CPU = ("instruction set", "threads")
NAMED = 3
"""Changed operators that are named."""


@dataclass(frozen=True)
class Pricing:
    """A profile as it prices a device; without one (`profile` None) a roofline does."""

    profile: Profile | None = None
    source: str = ""
    """Where the prices are from, in words: "h200.json (NVIDIA H200, torch 2.11.0)"; empty without a profile."""
    note: str = ""
    """What a reader should know about it, in one line."""
    _prices: dict[str, Prices] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """Of the profile in use; empty without one."""
        return "" if self.profile is None else self.profile.digest

    def prices(self, device: DeviceModel) -> Prices:
        """Prices on a device by this profile: every model of a process asks the same ones."""
        if device.name not in self._prices:
            self._prices[device.name] = Prices(device, self.profile)
        return self._prices[device.name]


UNPRICED = Pricing()


@dataclass(frozen=True)
class Profiles:
    """Where profiles are looked for: in one `file`, else in a `folder` under the device's name."""

    file: Path | None = None
    folder: Path | None = None

    def pricing(self, device: str, dtype: str = "") -> Pricing:
        """The prices of a device, for steps of a data type (empty: any). Raises ProfileError, in one line, where `file`
        is of no use for them, or where the file in the folder is corrupt; a sound one is left aside with a note."""
        path = self.file
        if path is None:
            path = None if self.folder is None else profile_file(self.folder, device, dtype)
            if path is None or not path.is_file():
                return UNPRICED
        profile = load(path)
        problem = refused(profile, device) or _lacking(profile, dtype) or _rounded_otherwise(profile, dtype)
        if problem:
            text = f"the operator profile {path} {problem}"
            if self.file is not None:
                raise ProfileError(text, hint="record one with magis profile, or leave it out")
            return Pricing(note=f"{text}: latencies are estimated")
        kept, changed = without_changed_operators(profile, schema_of)
        return Pricing(kept, f"{path.name} ({_origin(profile)})", _changes(profile, changed))


def profile_file(folder: Path, device: str, dtype: str = "") -> Path:
    """Where the profile of a device belongs: "cpu.json", "h200.json" (of "sim:h200" and of such a GPU).

    Products of float32 in tf32 are other kernels on tensors that look the same: they have a file of their own,
    "h200-tf32.json".
    """
    name = device.removeprefix("sim:")
    if device == "cuda":
        gpu = device_identity(device)["gpu"]
        name = gpu_name(gpu) or _plain(gpu)
    return folder / f"{name}{'-tf32' if dtype == 'tf32' else ''}.json"


def recording_identity(device: str, dtype: str = "") -> dict[str, str]:
    """The identity of a profile that is recorded here."""
    return {**device_identity(device), **({PRODUCTS: "tf32"} if dtype == "tf32" else {})}


def refused(profile: Profile, device: str) -> str:
    """Why a profile says nothing about a device, in words; empty where it does."""
    theirs = profile.device
    if device.startswith("sim:"):
        if gpu_name(theirs.get("gpu", "")) == device.removeprefix("sim:"):
            return ""
        return f"is of {_name(theirs)}, not of the GPU that {device} stands for"
    ours = device_identity(device)
    wanted = ("device", "gpu") if device == "cuda" else ("device", *SAME_CPU)
    if all(theirs.get(key) == ours.get(key) for key in wanted):
        return ""
    return f"is of {_name(theirs)}, this is {_name(ours)}"


def _lacking(profile: Profile, dtype: str) -> str:
    wanted = {tensor_type(dtype), autocast_type(dtype) or tensor_type(dtype)} if dtype else set()
    if wanted <= profile.dtypes:
        return ""
    known = ", ".join(sorted(profile.dtypes)) or "none at all"
    return f"has no {' or '.join(sorted(wanted - profile.dtypes))} operators (its data types: {known})"


def _rounded_otherwise(profile: Profile, dtype: str) -> str:
    theirs, ours = profile.device.get(PRODUCTS, "float32"), "tf32" if dtype == "tf32" else "float32"
    return "" if not dtype or theirs == ours else f"is of products in {theirs}, the case's are in {ours}"


def _name(identity: Mapping[str, str]) -> str:
    if identity.get("device") == "cpu":
        return f"a CPU with {identity.get('instruction set')} and {identity.get('threads')} threads"
    return identity.get("gpu") or identity.get("device") or "another device"


def _origin(profile: Profile) -> str:
    theirs = profile.device
    what = theirs.get("gpu") or f"{theirs.get('instruction set')}, {theirs.get('threads')} threads"
    return f"{what}, torch {theirs.get('torch')}"


def _changes(profile: Profile, changed: tuple[str, ...]) -> str:
    """Which operators the profile knows under another schema; they are priced without it."""
    if not changed:
        return ""
    names = ", ".join(changed[:NAMED]) + (", ..." if len(changed) > NAMED else "")
    return f"{len(changed)} operators differ from those of torch {profile.device.get('torch')}: {names}"


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
