"""Baselines of deleted tests: listed at the end of a run that collected all tests, removed by `--magis-prune`.

Only baselines of tests count: built-in models, factories and models of a conftest may belong to another command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

import pytest

from magis.errors import BaselineError
from magis.models.model_specs import all_names, is_factory
from magis.report import read_regular
from pytest_magis.baseline_files import LARGEST_FILE, baseline_path, parse
from pytest_magis.flags import COLLECTED, PARTLY
from pytest_magis.gate import Gate
from pytest_magis.live.gated_tests import claimed_names, is_live, is_marked, name_of


def why_unknown(session: pytest.Session, gate: Gate, unfinished: Collection[str]) -> str:
    """Return why a run cannot tell which tests were deleted; "" if it can. ``unfinished``: ids of unpassed nodes."""
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


def gone(session: pytest.Session, gate: Gate) -> tuple[list[Path], dict[Path, Path]]:
    """Return the baseline files of deleted tests, and those whose test may be in a file that was not collected.

    The latter map to the test file (excluded by `collect_ignore` or `testpaths`, for example).
    """
    config, folder = session.config, gate.settings.baselines
    nodes, items = config.stash[COLLECTED]
    known = {*claimed_names(config), *map(name_of, items)}
    models = {*all_names(), *(name for each in config.hook.pytest_magis_models(config=config) for name in each or ())}
    whole = {node.removesuffix(".py").replace("/", ".") for node in nodes if node.endswith(".py")}
    found, unseen = list[Path](), dict[Path, Path]()
    for path in sorted(folder.glob("*/*.json")):
        with suppress(BaselineError, OSError, UnicodeDecodeError):  # no file of ours
            baseline = parse(read_regular(path, LARGEST_FILE), path)
            name = baseline.model
            ours = path == baseline_path(folder, baseline.device, name) and name not in models and not is_factory(name)
            if ours and not {name, re.sub(r"\.\d+$", "", name)} & known:
                place = _not_collected(config, name, whole)
                if place is None:
                    found.append(path)
                else:
                    unseen[path] = place
    return found, unseen


def _not_collected(config: pytest.Config, name: str, whole: AbstractSet[str]) -> Path | None:
    """Return an uncollected file that may define the test of this name; None if there is none.

    A custom name does not tell the test's file, so any uncollected test file may define it.
    """
    starts = [name[: found.start()] for found in re.finditer(r"\.", name)]
    for start in starts:
        path = config.rootpath.joinpath(*start.split(".")).with_suffix(".py")
        if start not in whole and path.is_file():
            return path
    if not whole.isdisjoint(starts):
        return None
    return next((path for place, path in _files_of_tests(config) if place not in whole), None)


def _files_of_tests(config: pytest.Config) -> Iterator[tuple[str, Path]]:
    """Yield all test files below rootdir, each with the dotted path that its tests' names begin with."""
    seen = set[str]()
    for folder, folders, names in os.walk(config.rootpath, followlinks=True):
        here = Path(folder)
        if os.path.realpath(folder) in seen or {"pyvenv.cfg", "conda-meta"} & {*folders, *names}:
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for path in (here / each for each in sorted(names) if each.endswith(".py")):
            if any(path.match(pattern) for pattern in config.getini("python_files")):
                yield ".".join(path.relative_to(config.rootpath).with_suffix("").parts), path


def gone_baselines(session: pytest.Session, gate: Gate, unfinished: Collection[str], *, prune: bool) -> list[str]:
    """Return lines for the summary; with ``prune`` remove the files. Raises BaselineError for a partial run."""
    unknown = why_unknown(session, gate, unfinished)
    if unknown and prune:
        raise BaselineError(f"--magis-prune removes nothing: {unknown}", hint="give it to a run of all tests")
    paths, unseen = ([], {}) if unknown else gone(session, gate)
    root, lines = gate.settings.baselines.parent, []
    if prune and unseen:
        kept = ", ".join(str(path.relative_to(root)) for path in unseen)
        places = ", ".join(sorted({str(place.relative_to(session.config.rootpath)) for place in unseen.values()}))
        lines = [f"baselines that stay, since their tests may be in files that were not collected ({places}): {kept}"]
    if not paths:
        return lines
    names = ", ".join(str(path.relative_to(root)) for path in paths)
    if not prune:
        return [f"baselines of tests that are gone: {names}; --magis-prune removes them"]
    for path in paths:
        path.unlink(missing_ok=True)
    return [*lines, f"baselines of tests that are gone, removed: {names}"]
