"""`--magis-against`: run the tests on another version first, and compare with its figures instead of stored baselines.

The version is a git revision of the project, or this environment with other releases ("torch==2.12.0"). A child process
runs the same tests there, on the same machine, and stores its results in a folder of this run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from magis.child_process import terminated_in_order
from magis.errors import UsageError
from magis.extensions.versions import (
    GatedCase,
    GateRun,
    checkout,
    environment_of,
    is_requirement,
    repository,
    resolved,
    run_gate,
    scratch_folder,
    without_flag,
)
from magis.plain_records import to_plain
from magis.printable import printable
from magis.version_run import current_version_run
from pytest_magis.baselines import identity_key, stored_case
from pytest_magis.flags import BY_NAME
from pytest_magis.gate import Gate
from pytest_magis.lazy_activation import GATE
from pytest_magis.options import AGAINST, anywhere

FLAG = BY_NAME["against"].flag


def compare(config: pytest.Config, version: str) -> None:
    """Run the gate on another version, and compare this run with its figures. Raises pytest.UsageError in one line."""
    try:
        if anywhere(config).update:
            raise UsageError("nothing is stored in such a run", hint="leave out --magis-update")
        until_the_end = ExitStack()
        config.add_cleanup(until_the_end.close)
        until_the_end.enter_context(terminated_in_order())
        run = _measure_version(config, version, until_the_end.enter_context(scratch_folder()))
    except UsageError as error:
        text = str(error)
        raise pytest.UsageError(text if text.startswith("--magis-") else f"{FLAG}: {text}") from None
    config.stash[AGAINST] = run.baselines


def _measure_version(config: pytest.Config, version: str, folder: Path) -> GateRun:
    arguments = list(without_flag(map(str, config.invocation_params.args), FLAG))
    start = config.invocation_params.dir
    # one requirement, spaces in it included, or several with spaces between
    requirements = [version] if is_requirement(version) else version.split()
    if all(map(is_requirement, requirements)):
        python = environment_of(requirements, lambda text: _say(config, f"magis: {text}"), folder)
        _say(config, f"magis: measuring with {version} to compare with")
        return run_gate(version, arguments, folder / "run", start=start, python=python)
    root = repository(config.rootpath)
    commit = resolved(root, version)
    _say(config, f"magis: measuring {version} ({commit[:10]}) to compare with")
    with checkout(root, commit, folder / "checkout") as tree:
        return run_gate(version, arguments, folder / "run", start=start, root=root, tree=tree)


def _say(config: pytest.Config, text: str) -> None:
    text = printable(text)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # not made yet: pytest's own output has not begun
        sys.stderr.write(f"{text}\n")
    else:
        reporter.write_line(text)


class Guard:
    """Plugin of the child process on the other version: writes results into the folder of its `VersionRun`."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the outcome of each case, and the files of modules imported from the working tree by mistake."""
        run = current_version_run()
        if run is None:
            return
        left = GateRun(Path(run.folder))
        found = sorted(strays(dict(sys.modules), Path(run.root), Path(sys.prefix))) if run.root else []
        if found:
            with left.strays.open("a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in found)
        live = session.config.pluginmanager.get_plugin(GATE)
        if live is not None and not live.gate.is_worker:
            cases = [json.dumps(to_plain(case)) for case in gated_cases(live.gate)]
            left.cases.write_text("".join(f"{case}\n" for case in cases), encoding="utf-8")


def gated_cases(gate: Gate) -> Iterator[GatedCase]:
    """Yield the outcome of each case of a run as the `GatedCase` that the parent process reads."""
    for outcome in gate.ordered():
        verdict, result = outcome.verdict, outcome.result
        texts = [finding.text for finding in verdict.findings]
        is_whole = result is not None and not result.search.stopped_by_seconds
        baseline = gate.baseline(outcome.model, outcome.case) if is_whole else None
        stored = stored_case(baseline, outcome.label, outcome.case)
        known = tuple(stored.measured) if stored else ()
        here = identity_key(result) if result is not None and "torch" in result.identity else ""
        yield GatedCase(
            outcome.name,
            passed=verdict.passed,
            differs=outcome.error or "; ".join(texts) or ("" if is_whole else verdict.label),
            needs=verdict.needed if is_whole else (),
            stored_with=known,
            is_foreign=bool(known and here) and here not in known,
            path=str(gate.path(outcome.model, outcome.case)),
            outcome=outcome.to_text(),
        )


def strays(modules: Mapping[str, object], other: Path, prefix: Path) -> Iterator[str]:
    """Yield the files of modules below the folder `other` that do not belong to the environment `prefix` inside it."""
    for module in modules.values():
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            path = Path(file)
            if path.is_relative_to(other) and not path.is_relative_to(prefix) and "site-packages" not in path.parts:
                yield file
