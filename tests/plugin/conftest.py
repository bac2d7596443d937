"""Inner runs of the plugin on a made-up core: quick, without torch, files compared before and after."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.pytester import SysModulesSnapshot

from tests.brisk import SECONDS

CORE = Path(__file__).with_name("fake_core.py")
OWN_NETS = Path(__file__).with_name("own_nets.py")
PLUGINS = ("-p", "pytest_magis.plugin", "-p", "xdist.plugin")


class Gate:
    """Runs of the gate in a directory of their own."""

    strict = ("-W", "error", "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
    """Warnings are errors in an inner run, but for the one that the plugin is there already."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.monkeypatch = monkeypatch
        self.root = pytester.path
        pytester.syspathinsert()
        shutil.copyfile(CORE, self.root / "conftest.py")
        self.is_real = False
        # torch cannot be loaded twice, and much else takes long: of what inner runs load only what is theirs goes
        pytester._sys_modules_snapshot = self._modules()
        monkeypatch.setattr(pytester, "_Pytester__take_sys_modules_snapshot", self._modules)

    def _modules(self) -> SysModulesSnapshot:
        below = f"{self.root}{os.sep}"

        def stays(name: str) -> bool:  # thousands of modules, twice a run
            file = getattr(sys.modules[name], "__file__", None)
            return not (isinstance(file, str) and file.startswith(below))

        return SysModulesSnapshot(preserve=stays)

    def use_real_core(self) -> None:
        """From now on `magis.api` runs the cases; `own_nets` is there to be gated."""
        from magis.cases import comparison

        self.monkeypatch.setattr(comparison, "ROUGHLY", replace(comparison.ROUGHLY, seconds=SECONDS))
        self.monkeypatch.setattr(sys, "dont_write_bytecode", True)  # tests change modules between runs
        (self.root / "conftest.py").unlink()
        shutil.copyfile(OWN_NETS, self.root / OWN_NETS.name)
        self.is_real = True

    def extend_conftest(self, text: str) -> None:
        with (self.root / "conftest.py").open("a", encoding="utf-8") as stream:
            stream.write(text)

    def __call__(self, *args: str, workers: int = 0) -> pytest.RunResult:
        parallel = ("-n", str(workers)) if workers else ()
        if workers and self.is_real:  # workers find `own_nets` in the directory that they start in
            return self.in_subprocess(*parallel, *args)
        return self.pytester.runpytest_inprocess(*PLUGINS, *parallel, *args)

    def in_subprocess(self, *args: str) -> pytest.RunResult:
        brisk = ("-p", "tests.brisk") if self.is_real else ()
        return self.pytester.runpytest_subprocess(*PLUGINS, *brisk, *args)

    def fake(self, **changes: dict[str, Any]) -> None:
        """Change figures of the made-up core, by case name; `any_case` stands for all of them."""
        by_name = {"*" if name == "any_case" else name: change for name, change in changes.items()}
        (self.root / "fake.json").write_text(json.dumps(by_name), encoding="utf-8")

    def accept(self, *args: str, update: str = "new") -> None:
        """Run and store; every case must be accepted."""
        result = self(*args, f"--magis-update={update}")
        assert result.ret == 0, result.stdout.str()

    def rows(self, name: str = "results.csv") -> list[dict[str, str]]:
        with (self.root / name).open(newline="", encoding="utf-8") as stream:
            return list(csv.DictReader(stream))

    def calls(self) -> list[list[Any]]:
        """What the core was asked: [case name, process id, workspaces, graph], oldest first."""
        path = self.root / "calls.txt"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def baseline(self, model: str = "bert", device: str = "cpu") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "baselines" / device / f"{model}.json").read_text())
        return found

    def files(self) -> dict[str, bytes | None]:
        """Every file and directory with its content, caches and what pytester leaves left out."""
        skipped = {".pytest_cache", "__pycache__", "stdout", "stderr"}
        return {
            str(path.relative_to(self.root)): path.read_bytes() if path.is_file() else None
            for path in sorted(self.root.rglob("*"))
            if not skipped & set(path.relative_to(self.root).parts)
            and not path.relative_to(self.root).parts[0].startswith("runpytest-")
        }

    def refuses(self, *args: str, workers: int = 0) -> str:
        """Run with bad input: one line, exit code 4, no case run and nothing written. Returns the line."""
        before = self.files()
        result = self(*args, workers=workers)
        lines = result.stderr.str().splitlines()
        errors = [line for line in lines if line and not line.startswith("magis: ")]  # progress: on slow machines alone
        assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stdout.str()
        assert len(errors) == 1, errors
        assert errors[0].startswith("ERROR: "), errors
        assert self.files() == before
        return errors[0]


@pytest.fixture
def gate(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, repository: Path) -> Gate:
    """An empty directory with the made-up core; plugins other than xdist are off."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(repository))
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    return Gate(pytester, monkeypatch)


@pytest.fixture(params=[0, 2], ids=["serial", "n2"])
def workers(request: pytest.FixtureRequest) -> int:
    """Each test that takes this runs twice: in one process, and under pytest-xdist."""
    count: int = request.param
    return count


@pytest.fixture
def node_ids() -> Callable[[pytest.RunResult], list[str]]:
    """The gate's node ids that `--collect-only -q` printed, in order."""
    return lambda result: [line for line in result.outlines if line.startswith("magis::")]
