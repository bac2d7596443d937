"""Tests marked `magis`: each returns a network with its batch, and is parametrized with one item per case."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from magis.errors import MagisError, UsageError
from pytest_magis.harness import builder, forget
from pytest_magis.judged_case import failure, refused_in_one_line, run_item
from pytest_magis.live.asked_options import (
    AskedOptions,
    cases,
    cases_here,
    check_claim,
    read_asked,
    started_gate,
)
from pytest_magis.live.gated_tests import MARK, PARAM, label_of, name_of, node_id
from pytest_magis.options import anywhere

if TYPE_CHECKING:
    from magis.api import Workload

SHOWN = f"@pytest.mark.{MARK}"


class _Maker:
    """Cached builder of a test's network: the same object for all cases, with the fixtures of the running case."""

    def __init__(self, name: str, optimizer: Any) -> None:
        self.name = name
        self.call: Callable[[], object] = lambda: None
        self.make: Callable[[int], Workload] = builder(name, self._call_latest, optimizer)

    def _call_latest(self) -> object:
        return self.call()


_MAKER: pytest.StashKey[_Maker] = pytest.StashKey()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a marked test with one item per case, from its mark and the options."""
    definition = metafunc.definition
    try:
        if inspect.iscoroutinefunction(metafunc.function):
            raise UsageError(f"{SHOWN}: a coroutine cannot be gated", hint="return the module and its batch")
        asked = _asked(definition)
        labels = [each.label for each in cases(metafunc.config, "net", asked.over(anywhere(metafunc.config)))]
    except MagisError as error:
        raise failure(f"{definition.nodeid}: {error}") from None
    metafunc.fixturenames.append(PARAM)
    metafunc.parametrize(PARAM, labels)


def run_marked(item: pytest.Function) -> None:
    """Run the case of a marked item; the network is built by calling the test function."""
    gate, label = started_gate(item.config), label_of(item)
    with refused_in_one_line():
        asked = _asked(item)
        name = name_of(item, asked.name)
        check_claim(SHOWN, item, name)
        settings = asked.over(gate.settings)
        planned = next(each for each in cases_here(item.config, name, settings) if each.label == label)
    # All cases of a test share the builder of its network, and so a capture.
    maker = item.config.stash.get(_MAKER, None)
    if maker is None or maker.name != name:
        maker = item.config.stash[_MAKER] = _Maker(name, asked.optimizer)
    given = {argument: item.funcargs[argument] for argument in item._fixtureinfo.argnames}  # noqa: SLF001  (as pytest calls it)
    maker.call = partial(item.obj, **given)  # fixtures of an earlier case may have been torn down
    run_item(item, gate, replace(planned, make=maker.make, where=node_id(item)))


def free_network(config: pytest.Config) -> None:
    """Free the captures and fixtures of the last network."""
    forget(config)
    if _MAKER in config.stash:
        del config.stash[_MAKER]


def _asked(item: pytest.Item) -> AskedOptions:
    """Merge the marks of a function, its class and its module; the closest one wins."""
    merged: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(MARK))):
        if mark.args:
            raise UsageError(f"{SHOWN} takes names only, as in {SHOWN}(memory_ratios=[0.8])")
        merged |= mark.kwargs
    return read_asked(SHOWN, merged)
