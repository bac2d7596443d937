"""Options that a test sets for its own network, and access to the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from magis.current_gate import NAME
from magis.errors import UsageError, nearest
from magis.models.model_specs import all_names
from pytest_magis.flags import BY_NAME, MARK_ARGUMENTS, Settings
from pytest_magis.gate import Gate, all_strategies
from pytest_magis.live.gated_tests import claim_name
from pytest_magis.option_values import read_bytes
from pytest_magis.run_plan import Model, PlannedCase, plan_cases, plan_fronts

LIMITS = ("memory_ratios", "memory_limits", "latency_ratios")
PRESET = "small"
"""Preset under which baselines of tests' networks are stored; such a network has only one size."""


@dataclass(frozen=True)
class AskedOptions:
    """Options of a test's mark or call: name, optimizer, and overrides of fields of `Settings`."""

    name: str | None = None
    optimizer: Any = None
    """Torch optimizer, OptimizerSpec, or name of a kind; checked when the network is built."""
    changes: Mapping[str, Any] = field(default_factory=dict)

    def over(self, settings: Settings) -> Settings:
        """Return the settings overridden by these options. A limit of any kind replaces all limits."""
        replaced = LIMITS if any(name in self.changes for name in LIMITS) else ()
        return replace(settings, preset=PRESET, **{**dict.fromkeys(replaced, ()), **self.changes})


def read_asked(shown: str, given: Mapping[str, Any]) -> AskedOptions:
    """Parse options given by name. Raises UsageError, whose message begins with `shown`."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        where = f"{shown}: {name}"
        if name not in MARK_ARGUMENTS:
            raise UsageError(f"{shown} takes no {name!r}", hint=nearest(name, MARK_ARGUMENTS))
        if value is None or name == "optimizer":
            continue
        if name == "name":
            check_name(where, value)
        elif name == "memory_limit":
            changes["memory_limits"] = (_bytes(where, value),)
        elif name == "required":
            if not isinstance(value, bool):
                raise UsageError(f"{where}: {value!r} is neither True nor False")
            changes[name] = value
        else:
            kind, several = BY_NAME[name].kind, isinstance(value, Sequence) and not isinstance(value, str)
            if several and not kind.is_list:
                raise UsageError(f"{where}: {value!r} is a list, and it takes one value", hint="give one item alone")
            if name == "strategies" and several and not value:
                continue  # none of its own: those of the run
            texts = [str(each) for each in (value if several else [value])]
            if name == "dtype":  # `torch.bfloat16` is a data type as well
                texts = [text.removeprefix("torch.") for text in texts]
            changes[name] = kind.value(where, texts)
    return AskedOptions(given.get("name"), given.get("optimizer"), changes)


def _bytes(shown: str, value: Any) -> int:
    """Parse a memory limit, given in bytes or as text such as "2 GiB"."""
    found = read_bytes(shown, value) if isinstance(value, str) else value
    if type(found) is not int or found <= 0:
        raise UsageError(f"{shown}: {value!r} is no amount of memory above 0", hint='give bytes, or a text: "2 GiB"')
    return found


def cases(config: pytest.Config, name: str, settings: Settings) -> tuple[PlannedCase, ...]:
    """Plan the cases of a test's network and, with --magis-pareto, its Pareto front. Raises UsageError."""
    models = (Model(name, name),)
    return *plan_cases(settings, models, all_strategies(config), shown="strategies"), *plan_fronts(settings, models)


def check_name(shown: str, value: Any) -> str:
    """Return a valid name for baselines. Raises UsageError for any other value."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise UsageError(f"{shown}: {value!r} cannot be a name", hint="use letters, digits, '_', '-' and '.' only")
    if value in (*all_names(), "all", "seed"):
        raise UsageError(f"{shown}: magis has a model called {value!r} already", hint="choose another name")
    return value


def started_gate(config: pytest.Config) -> Gate:
    """Return the gate of the run; without `--magis-models`, the first gated test starts the gate.

    Raises pytest.UsageError for options that this machine cannot meet.
    """
    dormant: Any = config.pluginmanager.get_plugin("magis-dormant")
    gate: Gate = dormant.start_gate()
    return gate


def check_claim(shown: str, item: pytest.Item, name: str) -> None:
    """Raise UsageError if the network of another test has the same name."""
    other = claim_name(item, name)
    if other is not None:
        raise UsageError(f"{shown}: the network of {other} is called {name!r} too", hint="give each its name")


def cases_here(config: pytest.Config, name: str, settings: Settings) -> tuple[PlannedCase, ...]:
    """Plan the cases of a network that run now. Raises UsageError, also for a device that is not available."""
    device = settings.device  # that of the options has been checked
    found = config.hook.pytest_magis_devices(config=config)
    if device not in found:
        lacks = device.startswith(("cuda", "gpu")) and "cuda" not in found
        why = "needs a GPU and none was found" if lacks else "is unknown"
        raise UsageError(f"device {device!r} {why}", hint=nearest(device, found))
    return cases(config, name, settings)
