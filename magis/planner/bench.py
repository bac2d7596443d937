"""The models under test of a process: each is built once and shared by its cases."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch

from magis import registry
from magis.capture import Workload
from magis.cost.devices import device_names
from magis.dtypes import check_dtype
from magis.errors import UsageError, nearest
from magis.models.model_specs import PRESETS, ModelSpec, get, is_factory
from magis.planner.device_profiles import Pricing, Profiles
from magis.planner.shared_searches import Sharing
from magis.planner.subject import Subject
from magis.planner.workload_source import Source, running_seconds
from magis.report.text_store import Kept
from magis.results import Case
from magis.runtime.measure import trim
from magis.strategies.distributed_names import is_own
from magis.strategies.strategy_names import family
from magis.units import check_whole

KEPT = 2
Make: TypeAlias = Callable[[int], Workload]
"""Factory: seed -> workload."""


class Bench:
    """Cache of the last few subjects, so that cases of one model capture and measure the original step once.

    ``processes`` share the work of searches with fission; the folder ``resume`` keeps their partial results.
    ``profiles`` finds operator profiles; without one, latencies are estimated. The folder ``kept`` caches plans across
    runs and, with ``keep_results``, whole results: an unchanged step's result then returns without a run, with a note.
    ``agents`` provide the ranks of distributed strategies, else local processes do; ``close`` ends these processes.
    """

    def __init__(
        self,
        *,
        processes: int = 1,
        resume: Path | None = None,
        profiles: Profiles | None = None,
        kept: Path | None = None,
        keep_results: bool = False,
        agents: Any = None,
    ) -> None:
        self.kept = None if kept is None else Kept(kept)
        self._keeps_results = keep_results
        self._results: dict[Case, str] = {}
        self._agents = agents
        self._pool: Any = None
        self._sharing = Sharing(processes, resume)
        self._profiles = profiles or Profiles()
        self._pricings: dict[tuple[str, str], Pricing] = {}
        self._subjects: OrderedDict[tuple[object, ...], Subject] = OrderedDict()

    def subject(self, case: Case, make: Make | None = None) -> Subject:
        """Return the subject of a case, built by ``make`` or by the factory of the model's name. Cases with equal
        sources share one. Raises UsageError for an unknown model, preset, dtype or device."""
        if case.preset not in PRESETS:
            raise UsageError(f"unknown preset {case.preset!r}", hint=f"use one of {', '.join(PRESETS)}")
        check_device(case.device)
        for name, number, least in (("seed", case.seed, 0), ("accumulate", case.accumulate, 1)):
            check_whole(name, number, least)
        seconds = running_seconds(case.seconds)
        if make is not None:
            dtype = _checked_dtype(case.dtype or "", case.device)
            source = Source(
                case.model, make, dtype, case.device, case.seed, True, running_seconds=seconds,
                accumulate=case.accumulate,
            )  # fmt: skip
            return self.keep((case.model, make), source, case.slack, case.host_limit)
        spec = get(case.model)
        build = functools.partial(spec.build, case.preset)
        dtype, of_user = _dtype_of_case(spec, case), is_factory(case.model)
        source = Source(
            case.model, build, dtype, case.device, case.seed, of_user, running_seconds=seconds,
            accumulate=case.accumulate,
        )  # fmt: skip
        return self.keep((case.model, case.preset), source, case.slack, case.host_limit)

    def keep(self, what: tuple[object, ...], source: Source, slack: float = Case.slack, host_limit: int = 0) -> Subject:
        """Return the cached subject of a source, or a new one; ``what`` is part of the cache key."""
        asked = (source.dtype, source.device, source.seed, source.running_seconds, source.accumulate)
        key = (*what, *asked, slack, host_limit)
        subject = self._subjects.pop(key, None) or Subject(
            source, self._sharing, self.pricing(source.device, source.dtype), self.kept, slack, host_limit
        )
        self._subjects[key] = subject
        while len(self._subjects) > KEPT:
            self._subjects.popitem(last=False)
        return subject

    def pool_for(self, subject: Subject, make: Make | None) -> Callable[[int, str], Any] | None:
        """Return a function that starts the ranks to measure a subject; None where the subject can only be simulated:
        without the device or its memory, or for a factory function of this process."""
        if make is not None or subject.simulated_only or not subject.runs:
            return None
        return self._start_pool

    def _start_pool(self, size: int, device: str) -> Any:
        if self._pool is None or (self._pool.size, self._pool.device) != (size, device):
            self.close()
            self._pool = registry.load("ranks", "pool")(size, device, agents=self._agents)
        return self._pool

    def close(self) -> None:
        """Stop the ranks, if any run."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def forget(self) -> None:
        """Drop all subjects with their tensors, and release the allocator's cached memory."""
        if self._subjects:
            self._subjects.clear()
            trim()

    def keeps(self, case: Case) -> Kept | None:
        """Return the folder that caches the whole result of a case; None if results are not cached.

        Results of distributed strategies are not cached on agents, whose machines are unknown, or for a user's own
        strategy, whose code is unknown.
        """
        is_ranked = family(case.strategy) == "distributed"
        if not self._keeps_results or (is_ranked and (self._agents is not None or is_own(case.strategy))):
            return None
        return self.kept

    def remember(self, case: Case, key: str) -> None:
        """Record the cache key of a case's result."""
        self._results[case] = key

    def measure_again(self, case: Case) -> None:
        """Drop the cached result of a case, so that the case is measured again."""
        key = self._results.pop(case, None)
        if key is not None and self.kept is not None:
            self.kept.drop(key)

    def pricing(self, device: str, dtype: str) -> Pricing:
        """Return the prices of a device. Raises ProfileError for a corrupt profile, or a named one that does not
        fit."""
        if (device, dtype) not in self._pricings:
            self._pricings[device, dtype] = self._profiles.pricing(device, dtype)
        return self._pricings[device, dtype]


def check_profile(case: Case, *, cache: Bench | None = None) -> None:
    """Raise ProfileError, in one line, if the profile for a case is corrupt, or was named and does not fit."""
    (cache if cache is not None else Bench()).pricing(case.device, _dtype_of_case(get(case.model), case))


def _dtype_of_case(spec: ModelSpec, case: Case) -> str:
    """Return the dtype to which tensors are converted, checked; empty: tensors keep their own."""
    return _checked_dtype(case.dtype or (spec.paper_dtype if case.preset == "paper" else spec.dtype), case.device)


def _checked_dtype(dtype: str, device: str) -> str:
    if dtype:
        check_dtype(dtype, device)
    return dtype


def available_devices() -> tuple[str, ...]:
    """Return the devices on which cases can run here: the default first, simulated ones last."""
    real = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    return (*real, *(name for name in device_names() if name.startswith("sim:")))


def default_device() -> str:
    """Return "cuda" if there is a GPU, else "cpu"."""
    return available_devices()[0]


def check_device(name: str) -> None:
    """Raise UsageError unless cases can run on a device here."""
    if name in available_devices():
        return
    if str(name).startswith(("cuda", "gpu")) and "cuda" not in available_devices():
        raise UsageError(f"device {str(name)!r} asked for, but torch finds no GPU", hint="use cpu or sim:<name>")
    raise UsageError(f"unknown device {name!r}", hint=nearest(name, available_devices()))


# Rounding of float32 matrix products while a case runs.


@contextmanager
def products_of(dtype: str) -> Iterator[None]:
    """Run float32 matrix products and convolutions in tf32 within the block if the dtype is "tf32"; for other dtypes
    torch's settings stay."""
    if dtype != "tf32":
        yield
        return
    products = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn  # torch's stubs lack some of its attributes
    places = (products, convolutions.conv, convolutions.rnn)
    before = [place.fp32_precision for place in places]
    products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        # torch has an old and a new API for this setting, and refuses to read it where the two differ
        products.allow_tf32, convolutions.allow_tf32 = (state == "tf32" for state in before[:2])
        for place, state in zip(places, before, strict=True):
            place.fp32_precision = state
