"""Tests marked `magis`: each returns a network with its batch, and becomes one item for every case of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from magis.errors import MagisError, UsageError
from pytest_magis.harness import forget, recipe
from pytest_magis.judged_case import Live, judged, lines_of, searched_front
from pytest_magis.live.asked_options import (
    AskedOptions,
    awake,
    cases,
    cases_here,
    claim,
    read_asked,
    red,
    refused_in_one_line,
)
from pytest_magis.live.gated_tests import MARK, PARAM, label_of, name_of, node_id
from pytest_magis.options import anywhere
from pytest_magis.run_plan import FRONT, leave

if TYPE_CHECKING:
    from magis.api import Workload

SHOWN = f"@pytest.mark.{MARK}"


class _Maker:
    """How to build the network of a test, for all of its cases; by the fixtures of the case that runs."""

    def __init__(self, name: str, optimizer: Any) -> None:
        self.name = name
        self.call: Callable[[], object] = lambda: None
        self.make: Callable[[int], Workload] = recipe(name, self._called, optimizer)

    def _called(self) -> object:
        return self.call()


_MAKER: pytest.StashKey[_Maker] = pytest.StashKey()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """One item for each case of a marked test, by its mark and the options."""
    definition = metafunc.definition
    try:
        if inspect.iscoroutinefunction(metafunc.function):
            raise UsageError(f"{SHOWN}: a coroutine cannot be gated", hint="return the module and its batch")
        asked = _asked(definition)
        labels = [each.label for each in cases(metafunc.config, "net", asked.over(anywhere(metafunc.config)))]
    except MagisError as error:
        raise red(f"{definition.nodeid}: {error}") from None
    metafunc.fixturenames.append(PARAM)
    metafunc.parametrize(PARAM, labels)


def run(item: pytest.Function) -> None:
    """Run an item of a marked test in place of calling it: its function builds the network."""
    gate, label = awake(item.config), label_of(item)
    with refused_in_one_line():
        asked = _asked(item)
        name = name_of(item, asked.name)
        claim(SHOWN, item, name)
        settings = asked.over(gate.settings)
        planned = next(each for each in cases_here(item.config, name, settings) if each.label == label)
    live = Live(_maker(item, name, asked), settings.tolerances, node_id(item))
    if label == FRONT:
        with refused_in_one_line():
            leave(searched_front(item.config, gate, planned, live), item.user_properties)
        return
    for outcome in judged(item.config, gate, planned, live):
        leave(outcome, item.user_properties)
    if not outcome.verdict.passed:
        raise red("\n".join(lines_of(outcome, gate, item.config)))


def let_go(config: pytest.Config) -> None:
    """Keep nothing of the last network."""
    forget(config)
    if _MAKER in config.stash:
        del config.stash[_MAKER]


def _asked(item: pytest.Item) -> AskedOptions:
    """The marks of a function, its class and its module, the closest one first."""
    merged: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(MARK))):
        if mark.args:
            raise UsageError(f"{SHOWN} takes names only, as in {SHOWN}(memory_ratios=[0.8])")
        merged |= mark.kwargs
    return read_asked(SHOWN, merged)


def _maker(item: pytest.Function, name: str, asked: AskedOptions) -> Callable[[int], Workload]:
    """How to build the network; the same for all cases of a test, which then share what is captured of it."""
    maker = item.config.stash.get(_MAKER, None)
    if maker is None or maker.name != name:
        maker = item.config.stash[_MAKER] = _Maker(name, asked.optimizer)
    given = {argument: item.funcargs[argument] for argument in item._fixtureinfo.argnames}  # noqa: SLF001  (as pytest calls it)
    maker.call = partial(item.obj, **given)  # fixtures of an earlier case may have been torn down
    return maker.make
