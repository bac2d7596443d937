"""Predicates for gated tests, and the names of their networks."""

from __future__ import annotations

from collections.abc import Collection

import pytest

MARK = "magis"
FIXTURES = ("magis", "magis_peak")
OURS = "pytest_magis.plugin"
PARAM = "magis case"
"""Parameter of a marked test that holds the label of its case; a space keeps it distinct from any function argument."""
_OWNERS: pytest.StashKey[dict[str, set[str]]] = pytest.StashKey()


def is_marked(item: pytest.Item) -> bool:
    """Return True if a test has the mark, so that it returns a network to gate."""
    return isinstance(item, pytest.Function) and item.get_closest_marker(MARK) is not None


def is_live(item: pytest.Item) -> bool:
    """Return True if a test is gated: it has the mark, or uses a fixture of this plugin."""
    if is_marked(item):
        return True
    # a project may have a fixture of the same name
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return any(known.get(name) and known[name][-1].func.__module__ == OURS for name in FIXTURES)


def label_of(item: pytest.Function) -> str:
    """Return the label of the case that a marked item runs ("magis-mem0.8"); "" if the mark made no cases.

    The mark makes none if it was added by a parameter or a hook, or to a test of unittest.
    """
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.params.get(PARAM, ""))


def name_of(item: pytest.Item, given: str | None = None) -> str:
    """Return the unique name of a test's network in tables and baselines, such as "tests.test_memory.test_net".

    A `given` name replaces the path. Values of the test's own parameters are appended.
    """
    place, _, function = node_id(item).partition("::")
    plain, bracket, parameters = function.partition("[")
    if bracket and is_marked(item) and isinstance(item, pytest.Function):
        # ours is the last parameter: that of the case
        parameters = parameters.removesuffix("]").removesuffix(label_of(item)).removesuffix("-")
    else:
        parameters = parameters.removesuffix("]")
    here = given or f"{place.removesuffix('.py').replace('/', '.')}.{plain.replace('::', '.')}"
    return f"{here}-{parameters}" if parameters else here


def given_name(item: pytest.Item) -> str | None:
    """Return the name given by the closest mark that gives one; None if no mark does."""
    names = (mark.kwargs["name"] for mark in item.iter_markers(MARK) if mark.kwargs.get("name") is not None)
    return next(names, None)


def claim_name(item: pytest.Item, name: str) -> str | None:
    """Register a network's name for a test, and return another test that already has the same name, else None.

    Two tests with one name would share rows and baselines.
    """
    owners = item.config.stash.setdefault(_OWNERS, {}).setdefault(name, set())
    owners.add(name_of(item))
    return min(owners - {name_of(item)}, default=None)


def claimed_names(config: pytest.Config) -> Collection[str]:
    """Return all registered names of networks."""
    return config.stash.get(_OWNERS, {})


def node_id(item: pytest.Item) -> str:
    """Return the node id of a test without the "@<group>" that --dist=loadgroup appends."""
    groups = [mark.args[0] if mark.args else mark.kwargs.get("name") for mark in item.iter_markers("xdist_group")]
    for group in groups:
        if item.nodeid.endswith(f"@{group}"):
            return item.nodeid.removesuffix(f"@{group}")
    return item.nodeid


def subject_of(item: pytest.Item) -> str | None:
    """Return the name of the network that an item gates, equal for all cases of one network; None if it gates none."""
    planned = getattr(item, "planned", None)
    if planned is not None:
        return str(planned.model)
    return name_of(item) if is_live(item) else None


def benchmarks_count(config: pytest.Config) -> bool:
    """Return True if options of pytest-benchmark select or skip benchmarks, which include gated tests."""
    return any(bool(config.getoption(name, default=False)) for name in ("benchmark_only", "benchmark_skip"))
