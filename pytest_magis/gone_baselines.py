"""Baselines of tests that are gone: named at the end of a run that collected all tests, removed by `--magis-prune`.

A file is of a test unless its model is built in, a factory, or a name that a conftest gives one: these may be asked for
by any other command line.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import pytest

from magis.atomic_files import read_regular
from magis.errors import BaselineError
from magis.models.model_specs import all_names, is_factory
from pytest_magis.baseline_files import LARGEST_FILE, baseline_path, parse
from pytest_magis.flags import PARTLY
from pytest_magis.gate import Gate
from pytest_magis.live.gated_tests import claimed_names, is_live, is_marked, name_of


def why_unknown(session: pytest.Session, gate: Gate, unfinished: Collection[str]) -> str:
    """Why a run cannot tell which tests are gone; empty where it can. ``unfinished``: node ids that did not pass."""
    config, settings = session.config, gate.settings
    if config.pluginmanager.has_plugin("dsession"):
        return "tests were collected by several processes (-n)"
    named = config.args_source is pytest.Config.ArgsSource.ARGS or settings.only_gate
    if named or config.invocation_params.dir != config.rootpath:
        return "the run was of a part of the tests"
    left_out = any(config.getoption(name, default=None) for name in ("lf", "ignore", "ignore_glob"))
    if left_out or settings.shard is not None or config.stash.get(PARTLY, False):
        return "tests were left out, or could not be collected"
    if session.shouldstop or session.shouldfail:
        return "the run was stopped"
    if any(is_live(item) and not is_marked(item) and item.nodeid in unfinished for item in session.items):
        return "a test that uses the fixture did not pass, and may have gated more"
    return ""


def gone(session: pytest.Session, gate: Gate) -> list[Path]:
    """The files of tests that a whole run has not."""
    config, folder = session.config, gate.settings.baselines
    known = {*claimed_names(config), *(name_of(item) for item in session.items)}
    models = {*all_names(), *(name for each in config.hook.pytest_magis_models(config=config) for name in each or ())}
    found = []
    for path in sorted(folder.glob("*/*.json")):
        with suppress(BaselineError, OSError, UnicodeDecodeError):  # what is no baseline is nobody's
            baseline = parse(read_regular(path, LARGEST_FILE), path)
            name = baseline.model
            ours = path == baseline_path(folder, baseline.device, name) and name not in models and not is_factory(name)
            if ours and not {name, re.sub(r"\.\d+$", "", name)} & known:
                found.append(path)
    return found


def told(session: pytest.Session, gate: Gate, unfinished: Collection[str], *, prune: bool) -> list[str]:
    """Lines for the summary; with ``prune`` the files are removed. Raises BaselineError where that cannot be known."""
    unknown = why_unknown(session, gate, unfinished)
    if unknown and prune:
        raise BaselineError(f"--magis-prune removes nothing: {unknown}", hint="give it to a run of all tests")
    paths = [] if unknown else gone(session, gate)
    if not paths:
        return []
    names = ", ".join(str(path.relative_to(gate.settings.baselines.parent)) for path in paths)
    if not prune:
        return [f"baselines of tests that are gone: {names}; --magis-prune removes them"]
    for path in paths:
        path.unlink(missing_ok=True)
    return [f"baselines of tests that are gone, removed: {names}"]
