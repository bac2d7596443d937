"""Virtual environments that differ from the current one in some requirements, kept for later runs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import site
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

from filelock import FileLock
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from magis.child_process import run_bound
from magis.errors import UsageError

FOLDER = "MAGIS_ENVIRONMENTS"
"""Environment variable with the folder of environments (default: pytest-magis/environments in the user's cache)."""
READY = "ready"
"""Name of the file that marks a complete environment."""


def is_requirement(text: str) -> bool:
    """Return True if a text is a requirement with a version or an address ("torch==2.12.0", "timm<1.1")."""
    try:
        found = Requirement(text)
    except InvalidRequirement:
        return False
    return bool(found.specifier) or (found.url is not None and ":" in found.url and not found.url.startswith("{"))


def environment_of(requirements: Sequence[str], say: Callable[[str], None], scratch: Path) -> Path:
    """Return the Python interpreter of an environment with these requirements on top of the current packages.

    The environment is installed once, announced through `say`, and kept under a digest of the requirements and the
    current environment. A package at an address ("pkg @ file:///...") may change, so its environment is created in
    `scratch`, a folder of this run. Installed requirements shadow current packages. Raises UsageError with pip's last
    error if the installation fails; the incomplete environment is removed.
    """
    is_kept = not any(map(_has_address, requirements))
    place = (_folder() if is_kept else scratch) / _name(requirements)
    python = place / "bin" / "python"
    if (place / READY).is_file():
        return python
    where = f"an environment that is kept: {place}" if is_kept else "an environment of this run"
    say(f"installing {' '.join(requirements)} into {where}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            if not (place / READY).is_file():  # another process may have made it meanwhile
                _install(place, requirements)
    except OSError as error:
        raise UsageError(f"cannot make the environment {place}: {error.strerror or error}") from None
    return python


def _install(place: Path, requirements: Sequence[str]) -> None:
    shutil.rmtree(place, ignore_errors=True)  # of an installation that was cut off
    try:
        without = ["--without-pip"] if _has_pip() else []  # ours will do
        _checked_output([sys.executable, "-m", "venv", *without, str(place)])
        packages = next(place.glob("lib/python*/site-packages"))
        user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
        ours = [entry for entry in (*site.getsitepackages(), *user) if Path(entry).is_dir()]
        lines = [f"import site; site.addsitedir({entry!r})" for entry in ours]
        (packages / "of_the_other_environment.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        _pip(str(place / "bin" / "python"), "install", "--quiet", *requirements)
        addresses = list(filter(_has_address, requirements))
        if addresses:  # pip skips them if the current package has the same version
            _pip(str(place / "bin" / "python"), "install", "--quiet", "--no-deps", "--force-reinstall", *addresses)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    (place / READY).write_text("\n".join(requirements) + "\n", encoding="utf-8")


def _has_pip() -> bool:
    return PathFinder.find_spec("pip") is not None  # another finder replaces distutils where pip is looked for


def _has_address(requirement: str) -> bool:
    return Requirement(requirement).url is not None


def _pip(python: str, command: str, *arguments: str) -> str:
    """Return the output of a pip command. Raises UsageError with pip's last error."""
    return _checked_output([python, "-m", "pip", command, "--disable-pip-version-check", *arguments])


def _checked_output(command: Sequence[str]) -> str:
    done = run_bound(command)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        said = " ".join(errors[-1:]).removeprefix("ERROR: ") or "pip failed without a word"
        raise UsageError(said, hint="name releases that pip can install here")
    return done.stdout


def releases(first: str, last: str) -> list[str]:
    """Return the releases of a package between two requirements (`name==version`), inclusive, in order.

    Pre-releases and local builds between the two are left out. Raises UsageError for other requirements, and for a
    package that pip does not know.
    """
    good, bad = _pinned(first), _pinned(last)
    if good[0] != bad[0]:
        raise UsageError(f"{first} and {last} are two packages", hint="give two releases of one")
    if good[1] == bad[1]:
        raise UsageError(f"{first} and {last} are the same release", hint="give two releases")
    if not _has_pip():
        raise UsageError("there is no pip in this environment", hint="install it, or bisect from one that has it")
    listed = re.search(r"^Available versions: (.*)$", _pip(sys.executable, "index", "versions", good[0]), re.MULTILINE)
    if listed is None:
        raise UsageError(f"pip knows no releases of {good[0]}", hint="look at pip index versions")
    known = {
        good[1],
        bad[1],
        *(version for text in listed[1].split(",") if (version := read_version(text)) is not None),
    }
    low, high = sorted((good[1], bad[1]))
    between = [
        each
        for each in sorted(known)
        if low <= each <= high and (each in (low, high) or not (each.is_prerelease or each.local))
    ]
    if good[1] > bad[1]:
        between.reverse()
    return [f"{good[0]}=={each}" for each in between]


def _pinned(text: str) -> tuple[str, Version]:
    requirement = Requirement(text)
    pins = [each for each in requirement.specifier if each.operator == "=="]
    if len(pins) != 1 or (version := read_version(pins[0].version)) is None:
        raise UsageError(f"{text} names no single release", hint=f"write {requirement.name}==VERSION")
    return requirement.name, version


def read_version(text: str) -> Version | None:
    """Return the parsed version; None if the text is not a version."""
    try:
        return Version(text.strip())
    except InvalidVersion:
        return None


def _folder() -> Path:
    given = os.environ.get(FOLDER)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "pytest-magis" / "environments"


def _name(requirements: Sequence[str]) -> str:
    """Return an environment's name: a digest of the interpreter, the installed packages and the requirements."""
    here = sorted({f"{each.name}=={each.version}" for each in distributions()})  # pip keeps those that satisfy
    what = "\n".join((sys.version, sys.prefix, *here, *sorted(requirements)))
    first = Requirement(requirements[0]).name
    return f"{first}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
