"""Choosing the operator profile that prices a device, and saying why another one does not."""

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
"""Key in a profile's identity: how products of float32 were rounded, where that is not in full."""
FOLDER = "profiles"
"""Folder of profiles, beside the baselines of the devices."""
SAME_CPU = ("instruction set", "threads")
NAMED = 3
"""Number of changed operators that are named."""


@dataclass(frozen=True)
class Pricing:
    """A profile as it prices a device; without one (`profile` None) a roofline does."""

    profile: Profile | None = None
    source: str = ""
    """Profile and where it was recorded: "h200.json (NVIDIA H200, torch 2.11.0)"; empty without a profile."""
    note: str = ""
    """Caveat for the reader, in one line."""
    _prices: dict[str, Prices] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """Digest of the profile in use; empty without one."""
        return "" if self.profile is None else self.profile.digest

    def prices(self, device: DeviceModel) -> Prices:
        """Return the prices on a device by this profile: every model of a process asks the same ones."""
        if device.name not in self._prices:
            self._prices[device.name] = Prices(device, self.profile)
        return self._prices[device.name]


UNPRICED = Pricing()


@dataclass(frozen=True)
class Profiles:
    """Places where profiles are looked for: one `file`, else in a `folder` under the device's name."""

    file: Path | None = None
    folder: Path | None = None

    def pricing(self, device: str, dtype: str = "") -> Pricing:
        """Return the prices of a device, for steps of a data type (empty: any).

        Raises ProfileError, in one line, where `file` is of no use for them, or where the file in the folder is
        corrupt; a sound one that is of no use is left aside with a note.
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
        if changed:  # operators that the profile knows under another schema: priced without it
            names = ", ".join(changed[:NAMED]) + (", ..." if len(changed) > NAMED else "")
            note = f"{len(changed)} operators differ from those of torch {theirs.get('torch')}: {names}"
        return Pricing(kept, source, note)


def profile_file(folder: Path, device: str, dtype: str = "") -> Path:
    """Return the file of a device's profile: "cpu.json", "h200.json" (of "sim:h200" and of such a GPU). Products of
    float32 in tf32 are other kernels on tensors that look the same: they have a file of their own, "h200-tf32.json"."""
    name = device.removeprefix("sim:")
    if device == "cuda":
        gpu = device_identity(device)["gpu"]
        name = gpu_name(gpu) or re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return folder / f"{name}{'-tf32' if dtype == 'tf32' else ''}.json"


def recording_identity(device: str, dtype: str = "") -> dict[str, str]:
    """Return the identity of a profile that is recorded here."""
    return {**device_identity(device), **({PRODUCTS: "tf32"} if dtype == "tf32" else {})}


def refused(profile: Profile, device: str) -> str:
    """Say why a profile does not hold for a device; empty if it does."""
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
    """Say which operators or products of a data type a profile lacks; empty if none, or for any data type."""
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
