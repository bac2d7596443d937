"""Tells gated tests from others, and names their networks."""

from __future__ import annotations

from collections.abc import Collection

import pytest

MARK = "magis"
FIXTURES = ("magis", "magis_peak")
OURS = "pytest_magis.plugin"
PARAM = "magis case"
"""Parameter of a marked test whose value is the case; no argument of a function can have this name."""
_OWNERS: pytest.StashKey[dict[str, set[str]]] = pytest.StashKey()


def is_marked(item: pytest.Item) -> bool:
    """Return True for a test with the mark, which returns a network to gate."""
    return isinstance(item, pytest.Function) and item.get_closest_marker(MARK) is not None


def is_live(item: pytest.Item) -> bool:
    """Return True for a test that is gated: it has the mark, or uses one of our fixtures."""
    if is_marked(item):
        return True
    # a project may have a fixture of the same name
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return any(known.get(name) and known[name][-1].func.__module__ == OURS for name in FIXTURES)


def label_of(item: pytest.Function) -> str:
    """Return the label of the case that an item of a marked test is ("magis-mem0.8"), or "".

    It is empty if the mark made no cases: it came from a parameter or a hook, or is on a test of unittest.
    """
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.params.get(PARAM, ""))


def name_of(item: pytest.Item, given: str | None = None) -> str:
    """Name a test's network in tables and baselines: `given`, else its path ("tests.test_memory.test_net").

    The test's own parameters follow. The name is the same wherever the test runs, and no other test has it.
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
    """Return the name of a test's network by its closest mark that gives one; None without."""
    names = (mark.kwargs["name"] for mark in item.iter_markers(MARK) if mark.kwargs.get("name") is not None)
    return next(names, None)


def claim_name(item: pytest.Item, name: str) -> str | None:
    """Note the name of a test's network, and return another test whose network has the same name; None without one.

    The two would share rows and baselines, and each would be compared with the other.
    """
    owners = item.config.stash.setdefault(_OWNERS, {}).setdefault(name, set())
    owners.add(name_of(item))
    return min(owners - {name_of(item)}, default=None)


def claimed_names(config: pytest.Config) -> Collection[str]:
    """Return all names of networks so far."""
    return config.stash.get(_OWNERS, {})


def node_id(item: pytest.Item) -> str:
    """Return the node id of a test without the "@<group>" that --dist=loadgroup appends."""
    groups = [mark.args[0] if mark.args else mark.kwargs.get("name") for mark in item.iter_markers("xdist_group")]
    for group in groups:
        if item.nodeid.endswith(f"@{group}"):
            return item.nodeid.removesuffix(f"@{group}")
    return item.nodeid


def subject_of(item: pytest.Item) -> str | None:
    """Return the network of an item, the same for all its cases; None for a test that is not gated."""
    planned = getattr(item, "planned", None)
    if planned is not None:
        return str(planned.model)
    return name_of(item) if is_live(item) else None


def benchmarks_count(config: pytest.Config) -> bool:
    """Return True if options of pytest-benchmark select or skip benchmarks; gated tests then count as such."""
    return any(bool(config.getoption(name, default=False)) for name in ("benchmark_only", "benchmark_skip"))
