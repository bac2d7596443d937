"""Options that a test gives for its own network, and the start of the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from magis.current_gate import NAME
from magis.dtypes import DTYPES
from magis.errors import MagisError, UsageError, nearest
from magis.models.model_specs import all_names
from pytest_magis.gate import Gate, all_strategies
from pytest_magis.live.gated_tests import claim_name
from pytest_magis.option_values import READERS, choice, items, latency_ratios_of, memory_ratios_of
from pytest_magis.options import Settings
from pytest_magis.run_plan import Model, PlannedCase, plan_cases, plan_fronts

PRESET = "small"
"""A test's network has one size; its baselines are kept under this preset."""


@dataclass(frozen=True)
class AskedOptions:
    """Options of a test's mark or call; None for those not given."""

    name: str | None = None
    memory_ratios: tuple[float, ...] | None = None
    memory_limit_of: str | None = None
    latency_ratios: tuple[float, ...] | None = None
    strategies: tuple[str, ...] | None = None
    device: str | None = None
    dtype: str | None = None
    budget: str | None = None
    """In the form of `--magis-budget`: "default" overrides the budget of the command line, None does not."""
    seconds: float | None = None
    seed: int | None = None
    slack: float | None = None
    memory_tolerance: float | None = None
    latency_tolerance: float | None = None
    required: bool | None = None
    optimizer: Any = None
    """A torch optimizer, an OptimizerSpec, or the name of a kind; checked when the network is built."""

    def over(self, settings: Settings) -> Settings:
        """Return the settings with these options instead of the command line's. Limits replace all limits."""
        grid, tolerances = replace(settings.grid, preset=PRESET), settings.tolerances
        if self.memory_ratios is not None or self.latency_ratios is not None:
            grid = replace(grid, memory_ratios=self.memory_ratios or (), latency_ratios=self.latency_ratios or ())
        given = {
            name: getattr(self, name) for name in ("memory_limit_of", "device", "dtype", "seconds", "seed", "slack")
        }
        grid = replace(grid, **{name: value for name, value in given.items() if value is not None})
        if self.budget is not None:
            grid = replace(grid, budget=READERS["budget"]("budget", self.budget))
        if self.memory_tolerance is not None:
            tolerances = replace(tolerances, memory=self.memory_tolerance)
        if self.latency_tolerance is not None:
            tolerances = replace(tolerances, latency=self.latency_tolerance, simulated_latency=self.latency_tolerance)
        if self.required is not None:
            tolerances = replace(tolerances, needs_limits=self.required)
        return replace(settings, grid=grid, tolerances=tolerances, strategies=self.strategies or settings.strategies)


def read_asked(shown: str, given: Mapping[str, Any]) -> AskedOptions:
    """Read options by name. Raises UsageError, which begins with `shown`."""
    known = tuple(field.name for field in fields(AskedOptions))
    for name in given:
        if name not in known:
            raise UsageError(f"{shown} takes no {name!r}", hint=nearest(name, known))
    read = {
        name: _READERS[name](f"{shown}: {name}", value) if name in _READERS else value
        for name, value in given.items()
        if value is not None
    }
    return AskedOptions(**read)


def cases(config: pytest.Config, name: str, settings: Settings) -> tuple[PlannedCase, ...]:
    """Plan the cases of a test's network and, if fronts are asked for, its front. Raises UsageError."""
    models = (Model(name, name),)
    return *plan_cases(settings, models, all_strategies(config), shown="strategies"), *plan_fronts(settings, models)


def _texts(value: Any) -> list[str]:
    """Return the texts of a list, or of one item alone."""
    return [str(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]


def _word(shown: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{shown}: {value!r} is not a word")
    return value


def check_name(shown: str, value: Any) -> str:
    """Check a name for baselines. Raises UsageError."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise UsageError(f"{shown}: {value!r} cannot be a name", hint="use letters, digits, '_', '-' and '.' only")
    if value in (*all_names(), "all", "seed"):
        raise UsageError(f"{shown}: magis has a model called {value!r} already", hint="choose another name")
    return value


def _truth(shown: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{shown}: {value!r} is neither True nor False")
    return value


def _budget(shown: str, value: Any) -> str:
    READERS["budget"](shown, str(value))
    return str(value)


def _as_option(name: str) -> Callable[[str, Any], Any]:
    return lambda shown, value: READERS[name](shown, str(value))


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "name": check_name,
    "memory_ratios": lambda shown, value: memory_ratios_of(shown, _texts(value)),
    "memory_limit_of": _as_option("memory-limit-of"),
    "latency_ratios": lambda shown, value: latency_ratios_of(shown, _texts(value)),
    "strategies": lambda shown, value: items(shown, _texts(value)),
    "device": _word,
    "dtype": lambda shown, value: choice(shown, "dtype", str(value).removeprefix("torch."), DTYPES),
    "budget": _budget,
    "required": _truth,
    "seconds": _as_option("seconds"),
    "seed": _as_option("seed"),
    "slack": _as_option("slack"),
    "memory_tolerance": _as_option("memory-tolerance"),
    "latency_tolerance": _as_option("latency-tolerance"),
}


def started_gate(config: pytest.Config) -> Gate:
    """Return the gate of the run; without `--magis-models` the first gated test starts it.

    Raises pytest.UsageError for options that cannot be met on this machine.
    """
    dormant: Any = config.pluginmanager.get_plugin("magis-dormant")
    gate: Gate = dormant.start_gate()
    return gate


def failure(text: str) -> BaseException:
    """Return the exception that fails a test with these lines and no traceback."""
    return pytest.fail.Exception(text, pytrace=False)


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    """Turn an error of magis in the block into a failure of the test."""
    try:
        yield
    except MagisError as error:
        raise failure(str(error)) from None


def check_claim(shown: str, item: pytest.Item, name: str) -> None:
    """Raise UsageError if the network of another test has the same name."""
    other = claim_name(item, name)
    if other is not None:
        raise UsageError(f"{shown}: the network of {other} is called {name!r} too", hint="give each its name")


def cases_here(config: pytest.Config, name: str, settings: Settings) -> tuple[PlannedCase, ...]:
    """Plan the cases of a network, to run now. Raises UsageError for a device that is not here, too."""
    device = settings.grid.device  # that of the options has been checked
    found = config.hook.pytest_magis_devices(config=config)
    if device not in found:
        why = "needs a GPU and none was found" if device == "cuda" else "is unknown"
        raise UsageError(f"device {device!r} {why}", hint=nearest(device, found))
    return cases(config, name, settings)
