"""Planning of a run's cases from its settings, and serialization of outcomes between processes."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

from magis.errors import UsageError
from magis.models.model_specs import UnknownModelError, all_names, is_factory, resolve
from magis.plain_records import from_plain, to_plain
from magis.results import Case, CaseResult
from magis.strategies.strategy_names import PLANNED, check_planned
from pytest_magis.findings import Tolerances
from pytest_magis.flags import Settings
from pytest_magis.options import tolerances_of
from pytest_magis.strategies import Strategy, by_name, searched_case
from pytest_magis.verdict import Verdict

if TYPE_CHECKING:
    from magis.api import Workload

ALL = "all"
PREFIX = "magis::"
"""Prefix of the node ids of the gate's cases."""
FRONT = "pareto"
"""Label of a model's Pareto front."""
PROPERTY = "magis"
"""Name of the report property with a serialized `Outcome`."""
FRONT_PROPERTY = "magis-front"
"""Name of the report property with a serialized `WrittenFront`."""


@dataclass(frozen=True)
class Model:
    """Displayed name of a model, and its target in `magis`: the same name, or "package.module:factory"."""

    name: str
    target: str


@dataclass(frozen=True)
class PlannedCase:
    """Case to run, with its model's displayed name and its label."""

    model: str
    label: str
    case: Case
    tolerances: Tolerances
    optional: bool = False
    """If True, skip the case when its strategy does not fit the model, since only a pattern selected it."""
    make: Callable[[int], Workload] | None = None
    """Builder (seed -> workload) of the network of a user's test; None: build the case's model by name."""
    where: str = ""
    """Node id of the user's test."""

    @property
    def name(self) -> str:
        """Return the node id without "magis::", such as "bert[magis-mem0.8]"."""
        return f"{self.model}[{self.label}]"


@dataclass(frozen=True)
class Outcome:
    """Finished case with its result or error, serialized into test reports and so into JUnit files."""

    model: str
    label: str
    case: Case
    verdict: Verdict
    result: CaseResult | None = None
    error: str = ""
    where: str = ""
    """Node id of the user's test; empty for a case of `--magis-models`."""
    trace: str = ""
    """File with the case's time lines; empty if none was written."""
    snapshots: tuple[str, ...] = ()
    """Files of the memory snapshots that were written."""

    @property
    def name(self) -> str:
        """Return the node id without "magis::", such as "bert[magis-mem0.8]"."""
        return f"{self.model}[{self.label}]"

    def to_text(self) -> str:
        """Serialize the outcome to one line of JSON with exact floats, the inverse of `from_text`."""
        return json.dumps(to_plain(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Outcome:
        """Parse the output of `to_text`. Raises UsageError for any other text."""
        try:
            return from_plain(cls, json.loads(text), "outcome")
        except (ValueError, UsageError) as error:
            raise UsageError(f"not the outcome of a case: {text[:60]!r}") from error


@dataclass(frozen=True)
class WrittenFront:
    """Pareto front that was written to files: its model, the path of its picture, and a line for the summary."""

    model: str
    picture: str
    line: str


Properties: TypeAlias = list[tuple[str, object]]
"""User properties of a pytest item, copied into its report."""


def leave(found: Outcome | WrittenFront, properties: Properties) -> None:
    """Replace all outcomes in an item's properties, left by an earlier run of the item, with a new one."""
    forget_outcomes(properties)
    add(found, properties)


def add(found: Outcome | WrittenFront, properties: Properties) -> None:
    """Add an outcome to an item's properties."""
    entry = (PROPERTY, found.to_text()) if isinstance(found, Outcome) else (FRONT_PROPERTY, json.dumps(to_plain(found)))
    properties.append(entry)


def forget_outcomes(properties: Properties) -> None:
    """Remove all outcomes from an item's properties."""
    properties[:] = [entry for entry in properties if entry[0] not in (PROPERTY, FRONT_PROPERTY)]


def resolve_models(patterns: Sequence[str], further: Mapping[str, str]) -> tuple[Model, ...]:
    """Return the models that match the patterns, without duplicates; `further` are models of plugins, name -> factory.

    Raises UsageError for an unknown name, for an invalid or taken name in `further`, and for a factory whose package is
    not installed.
    """
    for name, target in further.items():
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise UsageError(f"a plugin adds the model {name!r}", hint="use letters, digits, '_', '-' and '.' only")
        if name in (*all_names(), "all", "seed"):
            raise UsageError(f"a plugin adds a model called {name!r}, which magis already has")
        if not is_factory(target):
            raise UsageError(f"a plugin adds the model {name!r} as {target!r}", hint="write package.module:factory")
        resolve([target])
    found: dict[str, Model] = {}
    for pattern in patterns:
        names = [name for name in further if fnmatchcase(name, pattern)] if not is_factory(pattern) else []
        try:
            names += resolve([pattern])
        except UnknownModelError:
            if not names:
                raise
        found |= {name: Model(name, further.get(name, name)) for name in names}
    for target in (model.target for model in found.values() if is_factory(model.target)):
        # the outermost package must exist; a deeper look would run the user's code too early
        package = target.partition(":")[0].partition(".")[0]
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise UsageError(
                f"{target}: no package {package!r}",
                hint="if it lies in the current directory, start `python -m pytest` or set `pythonpath = .` in the ini "
                "file; else install it",
            )
    return tuple(found.values())


def plan_cases(
    settings: Settings,
    models: Sequence[Model],
    strategies: Sequence[Strategy],
    shown: str = "--magis-strategies",
) -> tuple[PlannedCase, ...]:
    """Plan all cases of the run, model by model.

    Raises UsageError for duplicate labels, and for unknown strategies; the message begins with `shown`.
    """
    chosen = _chosen(settings.strategies, strategies, shown)
    cases: dict[str, PlannedCase] = {}
    taken = {f"{model.name}[{FRONT}]" for model in models}
    for model in models:
        for name, (strategy, optional) in chosen.items():
            try:
                labelled = list(strategy.cases(model.target, settings))
            except UsageError:
                if not optional:
                    raise
                continue  # it does not fit this run, and only a pattern asked for it
            for label, case in labelled:
                planned = PlannedCase(model.name, label, case, tolerances_of(settings), optional)
                if planned.name in taken:
                    raise UsageError(f"strategy {name!r} makes a case {planned.name}, which is the model's front")
                if planned.name in cases:
                    raise UsageError(f"strategy {name!r} makes the case {planned.name} a second time")
                cases[planned.name] = planned
    if not cases:
        raise UsageError(
            "the options leave no case to run", hint="give memory or latency ratios, or a further strategy"
        )
    return tuple(cases.values())


def _chosen(asked: Sequence[str], strategies: Sequence[Strategy], shown: str) -> dict[str, tuple[Strategy, bool]]:
    """Return the selected strategies by name, each with True if only a pattern ("all", "amp*") selected it."""
    known: dict[str, Strategy] = {}
    for strategy in strategies:
        if strategy.name in known:
            raise UsageError(f"two strategies are called {strategy.name!r}")
        known[strategy.name] = strategy
    found: dict[str, tuple[Strategy, bool]] = {}
    for name in asked:
        one = known.get(name) or by_name(name)
        if one is not None:
            found[name] = one, False
            continue
        matching = [each for each in known if name == ALL or fnmatchcase(each, name)]
        if not matching:
            check_planned(name)
            hint = f"choose from {', '.join((ALL, *known))}, and for ranks that plan {', '.join(PLANNED)}"
            raise UsageError(f"{shown}: unknown strategy {name!r}", hint=hint)
        for each in matching:
            found.setdefault(each, (known[each], True))
    return found


def plan_fronts(settings: Settings, models: Sequence[Model]) -> tuple[PlannedCase, ...]:
    """Plan a Pareto front per model if --magis-pareto is given; its case has no limits."""
    if settings.pareto is None:
        return ()
    return tuple(
        PlannedCase(model.name, FRONT, searched_case(settings, model.target, "magis"), tolerances_of(settings))
        for model in models
    )


def choose(cases: Sequence[PlannedCase], node_ids: Sequence[str]) -> tuple[PlannedCase, ...]:
    """Select cases by node ids ("magis::bert[eager]", or "magis::bert" for a model); without node ids, all."""
    wanted: set[str] = set()
    for node_id in node_ids:
        asked = node_id.removeprefix(PREFIX)
        matching = {planned.name for planned in cases if asked in (planned.name, planned.model)}
        if not matching:
            raise UsageError(f"no such case: {node_id}", hint=f"this run has {', '.join(c.name for c in cases[:8])}")
        wanted |= matching
    return tuple(planned for planned in cases if not node_ids or planned.name in wanted)
