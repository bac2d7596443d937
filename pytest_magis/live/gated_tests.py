"""Which tests are gated, and what their networks are called."""

from __future__ import annotations

from collections.abc import Collection

import pytest

MARK = "magis"
FIXTURES = ("magis", "magis_peak")
OURS = "pytest_magis.plugin"
PARAM = "magis case"
"""The parameter that tells the cases of a marked test apart; no argument of a function can be called so."""
_OWNERS: pytest.StashKey[dict[str, set[str]]] = pytest.StashKey()


def is_marked(item: pytest.Item) -> bool:
    """Whether a test returns a network to gate."""
    return isinstance(item, pytest.Function) and item.get_closest_marker(MARK) is not None


def is_live(item: pytest.Item) -> bool:
    """Whether a test is gated."""
    return is_marked(item) or _takes_fixture(item)


def _takes_fixture(item: pytest.Item) -> bool:
    """Whether a test uses our fixture, and not one of that name of its own project."""
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return any(known.get(name) and known[name][-1].func.__module__ == OURS for name in FIXTURES)


def label_of(item: pytest.Function) -> str:
    """The case that an item of a marked test is: "magis-mem0.8"; empty where the mark came too late to make cases, from
    a parameter or a hook, or sits on a test of unittest, which makes none."""
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.params.get(PARAM, ""))


def name_of(item: pytest.Item, given: str | None = None) -> str:
    """What tables and baselines call a test's network: `given`, else its place ("tests.test_memory.test_net"); with the
    test's own parameters. The same wherever the test runs, and no other test's."""
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
    """What the marks of a test call its network, if they do: the closest one's word."""
    names = (mark.kwargs["name"] for mark in item.iter_markers(MARK) if mark.kwargs.get("name") is not None)
    return next(names, None)


def claimed(item: pytest.Item, name: str) -> str | None:
    """Note that a test's network is called so; another test whose network is called so already, if there is one: the
    two would share rows and baselines, and each would be judged by the other's."""
    owners = item.config.stash.setdefault(_OWNERS, {}).setdefault(name, set())
    owners.add(name_of(item))
    return min(owners - {name_of(item)}, default=None)


def claimed_names(config: pytest.Config) -> Collection[str]:
    """All names so far."""
    return config.stash.get(_OWNERS, {})


def node_id(item: pytest.Item) -> str:
    """What the command line calls a test; --dist=loadgroup appends "@<group>" to that."""
    groups = [mark.args[0] if mark.args else mark.kwargs.get("name") for mark in item.iter_markers("xdist_group")]
    for group in groups:
        if item.nodeid.endswith(f"@{group}"):
            return item.nodeid.removesuffix(f"@{group}")
    return item.nodeid


def subject_of(item: pytest.Item) -> str | None:
    """The network that an item is about, the same for all its cases; None for a test that is not gated."""
    planned = getattr(item, "planned", None)
    if planned is not None:
        return str(planned.model)
    return name_of(item) if is_live(item) else None


def benchmarks_count(config: pytest.Config) -> bool:
    """Whether options of pytest-benchmark tell benchmarks, as which what the gate runs counts, from other tests."""
    return any(bool(config.getoption(name, default=False)) for name in ("benchmark_only", "benchmark_skip"))
